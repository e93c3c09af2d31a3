#include "safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "coda/error.h"
#include "coda/tensor.h"
#include "durable_file.h"
#include "json_file.h"

namespace coda::train {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and read as they are");

constexpr uint64_t kLargestHeader = 100'000'000;  // the limit of the format's own library
constexpr size_t kMostDimensions = 64;
constexpr int64_t kChunk = int64_t{1} << 18;  // elements converted at once: 1 MB of floats, inside L2

constexpr std::string_view kMetadata = "__metadata__";

struct DtypeWidth {
  std::string_view name;
  int64_t bits;
};
constexpr std::array kDtypes = {
    DtypeWidth{"F32", 32},    DtypeWidth{"BF16", 16},   DtypeWidth{"F16", 16},    DtypeWidth{"F64", 64},
    DtypeWidth{"BOOL", 8},    DtypeWidth{"U8", 8},      DtypeWidth{"I8", 8},      DtypeWidth{"U16", 16},
    DtypeWidth{"I16", 16},    DtypeWidth{"U32", 32},    DtypeWidth{"I32", 32},    DtypeWidth{"U64", 64},
    DtypeWidth{"I64", 64},    DtypeWidth{"C64", 64},    DtypeWidth{"F8_E4M3", 8}, DtypeWidth{"F8_E5M2", 8},
    DtypeWidth{"F8_E8M0", 8}, DtypeWidth{"F6_E2M3", 6}, DtypeWidth{"F6_E3M2", 6}, DtypeWidth{"F4", 4}};

std::optional<int64_t> bits_of(std::string_view dtype) {
  const auto found = std::ranges::find(kDtypes, dtype, &DtypeWidth::name);
  if (found == kDtypes.end()) return std::nullopt;
  return found->bits;
}

std::optional<int64_t> product(std::span<const int64_t> shape) {
  int64_t result = 1;
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(result, extent, &result)) return std::nullopt;
  }
  return result;
}

/// Takes the header's JSON event by event: names that occur twice are seen, nothing but the table itself is kept in
/// memory, and nesting that the format does not have ends the parse at once.
class HeaderParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderParser(const std::filesystem::path& path, std::map<std::string, StoredTensor>& tensors,
               std::map<std::string, std::string>& metadata)
      : path_(path), tensors_(tensors), metadata_(metadata) {}

  bool start_object(size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top && name_ == kMetadata) {
      place_ = Place::metadata;
    } else if (place_ == Place::top) {
      place_ = Place::tensor;
      tensor_ = {};
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else {
      misplaced("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == Place::top) {
      if (key == kMetadata ? has_metadata_ : tensors_.contains(key))
        fail(quote_name(key) + " occurs twice in the header");
      has_metadata_ |= key == kMetadata;
      name_ = std::move(key);
    } else if (place_ == Place::metadata) {
      if (metadata_.contains(key)) fail(quote_name(key) + " occurs twice in the header's metadata");
      field_ = std::move(key);
    } else {
      bool* seen = key == "dtype" ? &has_dtype_ : key == "shape" ? &has_shape_ : &has_offsets_;
      if (seen == &has_offsets_ && key != "data_offsets") {
        fail(fmt::format("tensor {} has a field {}, which the format does not have", quote_name(name_),
                         quote_name(key)));
      }
      if (std::exchange(*seen, true))
        fail(fmt::format("tensor {} has two fields {}", quote_name(name_), quote_name(key)));
      field_ = std::move(key);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      for (const auto& [seen, field] :
           {std::pair{has_dtype_, "dtype"}, std::pair{has_shape_, "shape"}, std::pair{has_offsets_, "data_offsets"}}) {
        if (!seen) fail(fmt::format("tensor {} has no field \"{}\"", quote_name(name_), field));
      }
      tensors_.emplace(name_, std::move(tensor_));
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor || field_ == "dtype") misplaced("a list");
    place_ = Place::list;
    list_.clear();
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    if (field_ == "shape") {
      tensor_.shape = list_;
    } else {
      if (list_.size() != 2) {
        fail(fmt::format("tensor {} has {} data_offsets; it needs 2", quote_name(name_), list_.size()));
      }
      tensor_.begin = list_[0];
      tensor_.end = list_[1];
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      metadata_.emplace(field_, std::move(value));
    } else if (place_ == Place::tensor && field_ == "dtype") {
      tensor_.dtype = std::move(value);
    } else {
      misplaced("a string");
    }
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::list) misplaced(std::to_string(value));
    if (value > uint64_t{std::numeric_limits<int64_t>::max()}) misplaced(std::to_string(value));
    if (list_.size() == kMostDimensions) {
      fail(fmt::format("tensor {} has more than {} {}", quote_name(name_), kMostDimensions,
                       field_ == "shape" ? "dimensions" : "data_offsets"));
    }
    list_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool number_integer(int64_t value) override { misplaced(std::to_string(value)); }
  bool number_float(double, const std::string& text) override { misplaced(text.substr(0, 40)); }
  bool boolean(bool value) override { misplaced(value ? "true" : "false"); }
  bool null() override { misplaced("null"); }
  bool binary(nlohmann::json::binary_t&) override { misplaced("binary data"); }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(fmt::format("its header is not valid JSON (byte {} of the header)", position));
  }

 private:
  enum class Place { outside, top, metadata, tensor, list };

  [[noreturn]] void fail(const std::string& trouble) const { throw FileError(path_.string(), trouble); }

  /// A value of a sort that its place does not take.
  [[noreturn]] void misplaced(const std::string& got) const {
    switch (place_) {
      case Place::outside:
        fail(fmt::format("its header is {}; it needs an object", got));
      case Place::top:
        fail(fmt::format("{} in the header is {}; it needs an object", quote_name(name_), got));
      case Place::metadata:
        fail(fmt::format("{} in the header's metadata is {}; it needs a string", quote_name(field_), got));
      case Place::tensor:
        fail(fmt::format("tensor {} has {} as {}; it needs {}", quote_name(name_), got, field_,
                         field_ == "dtype" ? "a string" : "a list of whole numbers"));
      case Place::list:
        break;
    }
    fail(fmt::format("tensor {} has {} in {}; it needs whole numbers from 0 to 2^63 - 1", quote_name(name_), got,
                     field_));
  }

  const std::filesystem::path& path_;
  std::map<std::string, StoredTensor>& tensors_;
  std::map<std::string, std::string>& metadata_;
  Place place_ = Place::outside;
  std::string name_, field_;
  StoredTensor tensor_;
  std::vector<int64_t> list_;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

/// Whatever the JSON said is well-formed; now it has to be true of a file with data_size bytes of tensors.
void check_layout(const std::filesystem::path& path, const std::map<std::string, StoredTensor>& tensors,
                  int64_t data_size) {
  const auto fail = [&](const std::string& trouble) { throw FileError(path.string(), trouble); };
  std::vector<const std::pair<const std::string, StoredTensor>*> in_file_order;
  for (const auto& entry : tensors) {
    const auto& [name, tensor] = entry;
    const std::optional<int64_t> bits = bits_of(tensor.dtype), elements = product(tensor.shape);
    if (!bits) fail(fmt::format("tensor {} has the unknown dtype {}", quote_name(name), quote_name(tensor.dtype)));
    int64_t total_bits = 0;
    if (!elements || __builtin_mul_overflow(*elements, *bits, &total_bits)) {
      fail(fmt::format("tensor {} has the shape {}, whose size does not fit in 63 bits", quote_name(name),
                       shape_text(tensor.shape)));
    }
    if (tensor.begin > tensor.end) {
      fail(fmt::format("tensor {} begins at byte {} and ends before it, at {}", quote_name(name), tensor.begin,
                       tensor.end));
    }
    if (tensor.end > data_size) {
      fail(fmt::format("tensor {} ends at byte {} but the file has {} bytes of tensors; it is cut short or damaged",
                       quote_name(name), tensor.end, data_size));
    }
    if (total_bits % 8 != 0 || tensor.end - tensor.begin != total_bits / 8) {
      fail(fmt::format("tensor {} has {} bytes; {} {} needs {}", quote_name(name), tensor.end - tensor.begin,
                       tensor.dtype, shape_text(tensor.shape), (total_bits + 7) / 8));
    }
    in_file_order.push_back(&entry);
  }

  std::ranges::sort(in_file_order, {}, [](const auto* e) { return std::pair(e->second.begin, e->second.end); });
  int64_t end = 0;
  for (const auto* entry : in_file_order) {
    const auto& [name, tensor] = *entry;
    if (tensor.begin < end) fail(fmt::format("tensor {} overlaps the one in front of it", quote_name(name)));
    if (tensor.begin > end) {
      fail(
          fmt::format("bytes {} to {} in front of tensor {} belong to no tensor", end, tensor.begin, quote_name(name)));
    }
    end = tensor.end;
  }
  if (end != data_size) fail(fmt::format("{} bytes at its end belong to no tensor", data_size - end));
}

float from_half(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  }
  const uint32_t wide_exponent = exponent == 31 ? 255 : exponent + (127 - 15);
  return std::bit_cast<float>(sign | wide_exponent << 23 | mantissa << 13);
}

}  // namespace

std::string shape_text(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

int64_t StoredTensor::size() const {
  return *product(shape);
}

SafetensorsFile::SafetensorsFile(std::filesystem::path name) : file_(std::move(name)) {
  const int64_t file_size = file_.size();
  if (file_size < 8) {
    throw FileError(path().string(), fmt::format("has {} bytes; a safetensors file has at least 8", file_size));
  }
  uint64_t header_size = 0;
  file_.read(0, &header_size, 8);
  if (header_size > kLargestHeader) {
    throw FileError(path().string(), fmt::format("says that its header has {} bytes; at most {} are allowed",
                                                 header_size, kLargestHeader));
  }
  if (static_cast<int64_t>(header_size) > file_size - 8) {
    throw FileError(path().string(),
                    fmt::format("says that its header has {} bytes, but only {} follow; it is cut short "
                                "or damaged",
                                header_size, file_size - 8));
  }
  std::string header(header_size, '\0');
  file_.read(8, header.data(), static_cast<int64_t>(header_size));
  HeaderParser parser(path(), tensors_, metadata_);
  nlohmann::json::sax_parse(header, &parser);
  data_offset_ = 8 + static_cast<int64_t>(header_size);
  check_layout(path(), tensors_, file_size - data_offset_);
}

const StoredTensor& SafetensorsFile::find_float(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw FileError(path().string(), fmt::format("has no tensor {}", quote_name(name)));
  const std::string& dtype = found->second.dtype;
  if (dtype != "F32" && dtype != "BF16" && dtype != "F16") {
    throw FileError(path().string(),
                    fmt::format("tensor {} is {}; it needs F32, BF16 or F16", quote_name(name), dtype));
  }
  return found->second;
}

void SafetensorsFile::read(const std::string& name, std::span<float> value) const {
  const StoredTensor& tensor = find_float(name);
  const auto size = static_cast<int64_t>(value.size());
  if (tensor.size() != size) {
    throw FileError(path().string(),
                    fmt::format("tensor {} has {} elements; it needs {}", quote_name(name), tensor.size(), size));
  }
  if (tensor.dtype == "F32") {
    file_.read(tensor_offset(tensor), value.data(), size * 4);
    return;
  }
  std::vector<uint16_t> narrow(static_cast<size_t>(std::min(size, kChunk)));
  for (int64_t first = 0; first < size; first += kChunk) {
    const int64_t count = std::min(kChunk, size - first);
    file_.read(tensor_offset(tensor) + first * 2, narrow.data(), count * 2);
    float* out = value.data() + first;
    if (tensor.dtype == "BF16") {
      for (int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(uint32_t{narrow[i]} << 16);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = from_half(narrow[i]);
    }
  }
}

bool SafetensorsFile::same(const SafetensorsFile& a, const std::string& name_a, const SafetensorsFile& b,
                           const std::string& name_b) {
  const StoredTensor& x = a.tensors_.at(name_a);
  const StoredTensor& y = b.tensors_.at(name_b);
  if (x.dtype != y.dtype || x.shape != y.shape) return false;
  constexpr int64_t kBytes = int64_t{1} << 20;
  std::vector<char> bytes_x(kBytes), bytes_y(kBytes);
  for (int64_t first = 0; first < x.end - x.begin; first += kBytes) {
    const int64_t count = std::min(kBytes, x.end - x.begin - first);
    a.file_.read(a.tensor_offset(x) + first, bytes_x.data(), count);
    b.file_.read(b.tensor_offset(y) + first, bytes_y.data(), count);
    if (std::memcmp(bytes_x.data(), bytes_y.data(), static_cast<size_t>(count)) != 0) return false;
  }
  return true;
}

int64_t TensorToWrite::bytes() const {
  const std::optional<int64_t> elements = product(shape);
  int64_t result = 0;
  if (!elements || *elements < 0 || __builtin_mul_overflow(*elements, format == FloatFormat::f32 ? 4 : 2, &result)) {
    throw UsageError(fmt::format("tensor {} has the shape {}, which has no size", quote_name(name), shape_text(shape)));
  }
  return result;
}

void write_safetensors(const std::filesystem::path& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  std::set<std::string_view> names = {kMetadata};
  int64_t offset = 0, largest = 0;
  for (const TensorToWrite& tensor : tensors) {
    if (!names.insert(tensor.name).second)
      throw UsageError(fmt::format("two tensors are named {}", quote_name(tensor.name)));
    const int64_t begin = offset;
    offset += tensor.bytes();
    largest = std::max(largest, *product(tensor.shape));
    // push_back rather than operator[]: an ordered object looks through all its keys, and the names are known to differ.
    header.get_ref<nlohmann::ordered_json::object_t&>().push_back(
        {tensor.name,
         {{"dtype", tensor.format == FloatFormat::f32 ? "F32" : "BF16"},
          {"shape", tensor.shape},
          {"data_offsets", {begin, offset}}}});
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the tensors are aligned for readers that map the file
  const uint64_t header_size = text.size();
  if (header_size > kLargestHeader)
    throw UsageError("the tensors' names and shapes do not fit in a safetensors header");

  DurableFile file(path);
  file.write(&header_size, 8);
  file.write(text.data(), text.size());
  std::vector<float> values(static_cast<size_t>(largest));
  std::vector<bf16> rounded(static_cast<size_t>(std::min(largest, kChunk)));
  for (const TensorToWrite& tensor : tensors) {
    const std::span<float> value(values.data(), static_cast<size_t>(*product(tensor.shape)));
    tensor.fill(value);
    if (tensor.format == FloatFormat::f32) {
      file.write(value.data(), value.size_bytes());
      continue;
    }
    for (size_t first = 0; first < value.size(); first += kChunk) {
      const size_t count = std::min(size_t{kChunk}, value.size() - first);
      for (size_t i = 0; i < count; ++i) rounded[i] = bf16(value[first + i]);
      file.write(rounded.data(), count * sizeof(bf16));
    }
  }
  file.finish();
}

}  // namespace coda::train
