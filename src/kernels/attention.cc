#include "llama/attention_blocks.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "coda/cpu/lanes.h"
#include "cpu/pack.h"

namespace coda::llama::detail {

namespace {

using coda::detail::Factor;
using cpu::Ints;
using cpu::iota;
using cpu::Lanes;
using cpu::load;
using cpu::Microkernel;
using cpu::store;

constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

/// 2^x for x <= 0 or a little above, to one unit in the last place, and 2^-126 below: nothing beside the 1 of a row's maximum.
/// NaN stays NaN.
template <class Isa>
CODA_FN Lanes<Isa> exp2_small(Lanes<Isa> x) {
  using L = Lanes<Isa>;
  x = max(L(-126.f), x);
  // x = n + f, |f| <= 1/2, f exact.
  const L shifted = x + L(L::kWhole);
  const L f = x - (shifted - L(L::kWhole));
  // (2^f - 1) / f interpolated in Chebyshev's nodes: relative error 1e-8.
  const L f2 = f * f;
  const L p01 = multiply_add(f, L(2.40226507e-1f), L(6.93147182e-1f));
  const L p23 = multiply_add(f, L(9.61808208e-3f), L(5.55035695e-2f));
  const L p45 = multiply_add(f, L(1.54532623e-4f), L(1.33909786e-3f));
  const L p = multiply_add(f, multiply_add(f2, multiply_add(f2, p45, p23), p01), L(1.f));
  return p * power_of_two(shifted);
}

/// rows × cols values one row after the other, cols a multiple of 16; rows up to padded_rows are zero.
template <class Isa, class E>
CODA_FN void copy_rows(const E* from, int64_t stride, int64_t rows, int64_t cols, float* to, int64_t padded_rows) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; j += Lanes<Isa>::width)
      store<Isa>(to + i * cols + j, load<Isa>(from + i * stride + j));
  std::memset(to + rows * cols, 0, static_cast<size_t>((padded_rows - rows) * cols) * sizeof(float));
}

/// to[j][i] = from[i][j]; rows <= to_stride, zero up to it.
template <class Isa, class E>
CODA_FN void transpose_rows(const E* from, int64_t stride, int64_t rows, int64_t cols, float* to, int64_t to_stride) {
  constexpr ElementType element = std::is_same_v<E, float> ? ElementType::float32 : ElementType::bfloat16;
  const Factor factor{.data = from, .element = element, .rows = rows, .depth = cols, .stride = stride};
  cpu::pack_columns<Isa>(factor, 0, rows, 0, cols, to, to_stride);
}

/// Tiles (token / 16, head, token % 16) of the columns of one matrix, as rows; tokens past the end are zero.
template <class Isa, class E>
CODA_FN void copy_tiles(const E* from, int64_t stride, int64_t tokens, int64_t padded_tokens, int64_t heads,
                        int64_t head_dim, float* to) {
  for (int64_t token = 0; token < padded_tokens; token += kTile)
    for (int64_t head = 0; head < heads; ++head, to += kTile * head_dim) {
      const int64_t left = tokens - token < 0 ? 0 : least(tokens - token, kTile);
      copy_rows<Isa>(from + token * stride + head * head_dim, stride, left, head_dim, to, kTile);
    }
}

/// One row of scores, of which the first valid ones count, becomes 2^(scale·s − max), and o what it is relative to the new
/// maximum.
template <class Isa>
CODA_FN void softmax_row(float* s, int64_t valid, int64_t cols, float scale, bool first, float* row_max, float* row_sum,
                         float* o, int64_t head_dim) {
  using L = Lanes<Isa>;
  constexpr int width = L::width, parts = kTile / width;
  const int64_t whole = valid / kTile * kTile;
  const int rest = static_cast<int>(valid - whole);

  L top[parts];
  for (int u = 0; u < parts; ++u) top[u] = L(-INFINITY);
  for (int64_t j = 0; j < whole; j += kTile)
    for (int u = 0; u < parts; ++u) top[u] = max(top[u], load<Isa>(s + j + u * width));
  if (rest > 0)
    for (int u = 0; u < parts; ++u)
      top[u] = max(top[u], select(iota<Isa>() < Ints<Isa>(rest - u * width), load<Isa>(s + whole + u * width), top[u]));
  for (int u = 1; u < parts; ++u) top[0] = max(top[0], top[u]);
  const float highest = cpu::maximum<Isa>(top[0]) * scale;

  float corrected_sum = 0;
  float new_max = highest;
  if (!first) {
    new_max = highest > *row_max ? highest : *row_max;
    corrected_sum = *row_sum;
    if (new_max != *row_max) {
      const L correction = exp2_small<Isa>(L(*row_max - new_max));
      for (int64_t j = 0; j < head_dim; j += width) store<Isa>(o + j, correction * load<Isa>(o + j));
      alignas(64) float lane[width];
      store<Isa>(lane, correction);
      corrected_sum *= lane[0];
    }
  }
  *row_max = new_max;

  L sum[parts];
  for (int u = 0; u < parts; ++u) sum[u] = L(0.f);
  const L factor(scale), shift(-new_max);
  for (int64_t j = 0; j < whole; j += kTile)
    for (int u = 0; u < parts; ++u) {
      const L p = exp2_small<Isa>(fma(load<Isa>(s + j + u * width), factor, shift));
      sum[u] = sum[u] + p;
      store<Isa>(s + j + u * width, p);
    }
  int64_t done = whole;
  if (rest > 0) {
    for (int u = 0; u < parts; ++u) {
      const L p = exp2_small<Isa>(fma(load<Isa>(s + whole + u * width), factor, shift));
      const L kept = select(iota<Isa>() < Ints<Isa>(rest - u * width), p, L(0.f));
      sum[u] = sum[u] + kept;
      store<Isa>(s + whole + u * width, kept);
    }
    done += kTile;
  }
  if (done < cols) std::memset(s + done, 0, static_cast<size_t>(cols - done) * sizeof(float));
  for (int u = 1; u < parts; ++u) sum[0] = sum[0] + sum[u];
  *row_sum = corrected_sum + cpu::sum<Isa>(sum[0]);
}

}  // namespace

// ---- forward ----------------------------------------------------------------------------------------------------------

template <class Isa, class E>
void attend(const Forward<E>& forward, const QueryChunk& chunk, float* scratch) {
  using L = Lanes<Isa>;
  const AttentionShape& shape = forward.shape;
  const Blocking& b = forward.blocking;
  const int64_t dh = shape.head_dim;
  const int64_t group = shape.heads / shape.kv_heads, bunches = group / b.heads_together;
  const int64_t document = chunk.document.start;
  const int64_t tokens = least(b.query_chunk, chunk.document.tokens - chunk.first);
  const int64_t rows = b.strip_rows();
  const int64_t strips = (tokens + b.strip_tokens - 1) / b.strip_tokens;
  const float scale = kLog2E / std::sqrt(static_cast<float>(dh));  // scores and their maxima are in powers of 2

  // Rows of q, o and the statistics: (strip, bunch of heads, tile, head, token).
  const int64_t chunk_rows = b.query_chunk * group;
  float* q = scratch;                   // [chunk_rows, dh]
  float* o = q + chunk_rows * dh;       // [chunk_rows, dh]
  float* k = o + chunk_rows * dh;       // [dh, key_block]
  float* v = k + b.key_block * dh;      // [key_block, dh]
  float* s = v + b.key_block * dh;      // [rows, key_block]
  float* top = s + rows * b.key_block;  // [chunk_rows]
  float* sum = top + chunk_rows;        // [chunk_rows]

  const int64_t first_head = chunk.kv_head * group;
  for (int64_t strip = 0; strip < strips; ++strip)
    for (int64_t bunch = 0; bunch < bunches; ++bunch) {
      const int64_t token = strip * b.strip_tokens;
      const E* from = forward.qkv.row(document + chunk.first + token) + (first_head + bunch * b.heads_together) * dh;
      copy_tiles<Isa>(from, forward.qkv.stride, tokens - token, b.strip_tokens, b.heads_together, dh,
                      q + (strip * bunches + bunch) * rows * dh);
    }

  const int64_t end = chunk.first + tokens;
  for (int64_t key = 0; key < end; key += b.key_block) {
    const int64_t keys = least(b.key_block, end - key), padded_keys = round_up(keys, kTile);
    const E* k_from = forward.qkv.row(document + key) + shape.query_width() + chunk.kv_head * dh;
    transpose_rows<Isa>(k_from, forward.qkv.stride, keys, dh, k, b.key_block);
    copy_rows<Isa>(k_from + shape.kv_width(), forward.qkv.stride, keys, dh, v, padded_keys);

    const int64_t first_strip = key <= chunk.first ? 0 : (key - chunk.first) / b.strip_tokens;
    for (int64_t strip = first_strip; strip < strips; ++strip) {
      const int64_t token = chunk.first + strip * b.strip_tokens;
      // Keys after the strip's last token are of no use to it.
      const int64_t cols = least(padded_keys, token + b.strip_tokens - key);
      const Microkernel& scores = forward.products.scores[cols / kTile - 1];
      const Microkernel& values =
          (key == 0 ? forward.products.first_values : forward.products.more_values)[cols / kTile - 1];
      for (int64_t bunch = 0; bunch < bunches; ++bunch) {
        const int64_t row = (strip * bunches + bunch) * rows;
        scores(q + row * dh, k, s);
        for (int64_t i = 0, tile = token; i < rows; tile += kTile)
          for (int64_t next = i + kTile * b.heads_together; i < next; ++i) {
            const int64_t seen = least(tile + i % kTile + 1 - key, cols);
            softmax_row<Isa>(s + i * b.key_block, seen, cols, scale, key == 0, top + row + i, sum + row + i,
                             o + (row + i) * dh, dh);
          }
        values(s, v, o + row * dh);
      }
    }
  }

  for (int64_t strip = 0; strip < strips; ++strip)
    for (int64_t head = 0; head < group; ++head)
      for (int64_t tile = 0; tile * kTile < b.strip_tokens; ++tile) {
        const int64_t token = strip * b.strip_tokens + tile * kTile;
        const int64_t left = least(tokens - token, kTile);
        if (left <= 0) break;
        const int64_t bunch = head / b.heads_together;
        const int64_t row =
            (strip * bunches + bunch) * rows + (tile * b.heads_together + head % b.heads_together) * kTile;
        for (int64_t i = 0; i < left; ++i) {
          const L divisor(sum[row + i]);
          const float* from = o + (row + i) * dh;
          E* to = forward.out.row(document + chunk.first + token + i) + (first_head + head) * dh;
          for (int64_t j = 0; j < dh; j += L::width) store<Isa>(to + j, load<Isa>(from + j) / divisor);
        }
        if (forward.log_sum_exp.data == nullptr) continue;
        float* lse = forward.log_sum_exp.row(first_head + head) + document + chunk.first + token;
        for (int64_t i = 0; i < left; i += L::width)
          store<Isa>(lse + i, fma(load<Isa>(top + row + i), L(kLn2), log(load<Isa>(sum + row + i))),
                     static_cast<int>(least(left - i, L::width)));
      }
}

// ---- backward ---------------------------------------------------------------------------------------------------------

namespace {

/// d_p and s become d_s and p. Column j is a query; the first masked columns see key i of the strip only from token i on.
template <class Isa>
CODA_FN void softmax_backward(float* s, float* d_p, int64_t keys, int64_t cols, int64_t stride, int64_t masked,
                              float scale, const float* log_sum_exp, const float* delta) {
  using L = Lanes<Isa>;
  const L factor(scale);
  for (int64_t i = 0; i < keys; ++i) {
    float* s_row = s + i * stride;
    float* d_row = d_p + i * stride;
    for (int64_t j = 0; j < cols; j += L::width) {
      L p = exp2_small<Isa>(fma(load<Isa>(s_row + j), factor, -load<Isa>(log_sum_exp + j)));
      if (j < masked) {
        const int token = static_cast<int>(j % kTile);
        p = select(iota<Isa>() < Ints<Isa>(static_cast<int>(i) - token), L(0.f), p);
      }
      store<Isa>(s_row + j, p);
      store<Isa>(d_row + j, p * (load<Isa>(d_row + j) - load<Isa>(delta + j)));
    }
  }
}

}  // namespace

template <class Isa, class E>
void attend_backward(const Backward<E>& backward, const KeyChunk& chunk, float* scratch) {
  using L = Lanes<Isa>;
  const AttentionShape& shape = backward.shape;
  const Blocking& b = backward.blocking;
  const int64_t dh = shape.head_dim;
  const int64_t group = shape.heads / shape.kv_heads, bunches = group / b.heads_together;
  const int64_t document = chunk.document.start, tokens = chunk.document.tokens;
  const int64_t cols = b.query_columns(), tile_cols = kTile * b.heads_together, tiles = b.query_block / kTile;
  const float scale = 1 / std::sqrt(static_cast<float>(dh));

  float* k = scratch;                     // [key_chunk, dh]
  float* k_t = k + b.key_chunk * dh;      // [dh, key_chunk]
  float* v = k_t + b.key_chunk * dh;      // [key_chunk, dh]
  float* d_k = v + b.key_chunk * dh;      // [key_chunk, dh]
  float* d_v = d_k + b.key_chunk * dh;    // [key_chunk, dh]
  float* q = d_v + b.key_chunk * dh;      // [cols, dh]
  float* q_t = q + cols * dh;             // [dh, cols]
  float* d_o = q_t + cols * dh;           // [cols, dh]
  float* d_o_t = d_o + cols * dh;         // [dh, cols]
  float* d_q_t = d_o_t + cols * dh;       // [dh, cols]
  float* d_q = d_q_t + cols * dh;         // [cols, dh]
  float* s = d_q + cols * dh;             // [key_strip, cols]
  float* d_p = s + b.key_strip * cols;    // [key_strip, cols]
  float* lse = d_p + b.key_strip * cols;  // [cols]
  float* delta = lse + cols;              // [cols]

  const int64_t keys = least(b.key_chunk, tokens - chunk.first);
  const E* k_from = backward.qkv.row(document + chunk.first) + shape.query_width() + chunk.kv_head * dh;
  const int64_t padded_keys = round_up(keys, kTile);
  copy_rows<Isa>(k_from, backward.qkv.stride, keys, dh, k, padded_keys);
  transpose_rows<Isa>(k, dh, padded_keys, dh, k_t, b.key_chunk);
  copy_rows<Isa>(k_from + shape.kv_width(), backward.qkv.stride, keys, dh, v, padded_keys);
  std::memset(d_k, 0, static_cast<size_t>(2 * b.key_chunk * dh) * sizeof(float));

  for (int64_t query = chunk.first; query < tokens; query += b.query_block) {
    const int64_t queries = least(b.query_block, tokens - query);
    const bool on_border = query < chunk.first + b.key_chunk;
    const int64_t whole_keys = on_border ? query - chunk.first : b.key_chunk;  // seen by every query of the block

    for (int64_t bunch = 0; bunch < bunches; ++bunch) {
      const int64_t head = chunk.kv_head * group + bunch * b.heads_together;
      const int64_t row = document + query;
      copy_tiles<Isa>(backward.qkv.row(row) + head * dh, backward.qkv.stride, queries, b.query_block, b.heads_together,
                      dh, q);
      transpose_rows<Isa>(q, dh, cols, dh, q_t, cols);
      copy_tiles<Isa>(backward.d_out.row(row) + head * dh, backward.d_out.stride, queries, b.query_block,
                      b.heads_together, dh, d_o);
      transpose_rows<Isa>(d_o, dh, cols, dh, d_o_t, cols);
      int64_t c = 0;
      for (int64_t tile = 0; tile < b.query_block; tile += kTile)
        for (int64_t one = head; one < head + b.heads_together; ++one)
          for (int64_t token = tile; token < tile + kTile; ++token, ++c) {
            if (token >= queries) {  // no query: its p is 2^-126 and its d_out 0
              lse[c] = INFINITY;
              delta[c] = 0;
              continue;
            }
            lse[c] = backward.log_sum_exp(one, row + token) * kLog2E;
            const E* o = backward.out.row(row + token) + one * dh;
            L sum(0.f);
            for (int64_t j = 0; j < dh; j += L::width) sum = fma(load<Isa>(o + j), load<Isa>(d_o + c * dh + j), sum);
            delta[c] = cpu::sum<Isa>(sum);
          }
      std::memset(d_q_t, 0, static_cast<size_t>(cols * dh) * sizeof(float));

      const auto strip = [&](const BackwardProducts& products, int64_t key, int64_t strip_keys, int64_t col,
                             int64_t masked) {
        products.scores(k + key * dh, q_t + col, s);
        products.scores(v + key * dh, d_o_t + col, d_p);
        softmax_backward<Isa>(s, d_p, strip_keys, cols - col, cols, masked, scale * kLog2E, lse + col, delta + col);
        products.keys(s, d_o + col * dh, d_v + key * dh);
        products.keys(d_p, q + col * dh, d_k + key * dh);
        products.queries(k_t + key, d_p, d_q_t + col);
      };
      for (int64_t key = 0; key < whole_keys; key += b.key_strip) {
        const int64_t strip_keys = least(b.key_strip, whole_keys - key);
        strip(backward.by_keys[strip_keys / kTile - 1], key, strip_keys, 0, 0);
      }
      if (on_border)
        for (int64_t tile = 0; tile < tiles && query + tile * kTile < tokens; ++tile)
          strip(backward.by_tiles[tiles - tile - 1], whole_keys + tile * kTile, kTile, tile * tile_cols, tile_cols);

      transpose_rows<Isa>(d_q_t, cols, dh, cols, d_q, dh);
      const bool first = chunk.previous == nullptr;
      if (!first && bunch == 0) chunk.previous->wait_for(query + queries);
      c = 0;
      for (int64_t tile = 0; tile < b.query_block; tile += kTile)
        for (int64_t one = head; one < head + b.heads_together; ++one)
          for (int64_t token = tile; token < tile + kTile; ++token, ++c) {
            if (token >= queries) continue;
            const float* from = d_q + c * dh;
            // A document of one chunk has no sum: the matrix may be null.
            float* total = first && on_border ? nullptr : backward.d_q_sum.row(row + token) + one * dh;
            E* to = backward.d_qkv.row(row + token) + one * dh;
            for (int64_t j = 0; j < dh; j += L::width) {
              L x = load<Isa>(from + j);
              if (!first) x = x + load<Isa>(total + j);
              // The chunk that holds the query's own key is the last that it sees.
              if (on_border)
                store<Isa>(to + j, x * L(scale));
              else
                store<Isa>(total + j, x);
            }
          }
    }
    chunk.own->reach(query + queries);
  }

  for (int64_t i = 0; i < keys; ++i) {
    E* to = backward.d_qkv.row(document + chunk.first + i) + shape.query_width() + chunk.kv_head * dh;
    for (int64_t j = 0; j < dh; j += L::width) {
      store<Isa>(to + j, load<Isa>(d_k + i * dh + j) * L(scale));
      store<Isa>(to + shape.kv_width() + j, load<Isa>(d_v + i * dh + j));
    }
  }
}

// ---- one token ----------------------------------------------------------------------------------------------------------

template <class Isa, class E>
void attend_one(const Decode<E>& decode, int64_t kv_head, float* scratch) {
  using L = Lanes<Isa>;
  const AttentionShape& shape = decode.shape;
  const int64_t dh = shape.head_dim, group = shape.heads / shape.kv_heads;
  const float scale = kLog2E / std::sqrt(static_cast<float>(dh));
  float* q = scratch;                    // [group, dh]
  float* o = q + group * dh;             // [group, dh]
  float* s = o + group * dh;             // [group, kDecodeKeys]
  float* top = s + group * kDecodeKeys;  // [group]
  float* sum = top + group;              // [group]
  copy_rows<Isa>(decode.q + kv_head * group * dh, dh, group, dh, q, group);

  for (int64_t key = 0; key < decode.k.rows; key += kDecodeKeys) {
    const int64_t keys = least(kDecodeKeys, decode.k.rows - key);
    for (int64_t i = 0; i < keys; ++i) {
      const E* k = decode.k.row(key + i) + kv_head * dh;
      for (int64_t head = 0; head < group; ++head) {
        L dot(0.f);
        for (int64_t j = 0; j < dh; j += L::width) dot = fma(load<Isa>(q + head * dh + j), load<Isa>(k + j), dot);
        s[head * kDecodeKeys + i] = cpu::sum<Isa>(dot);
      }
    }
    if (key == 0) std::memset(o, 0, static_cast<size_t>(group * dh) * sizeof(float));
    for (int64_t head = 0; head < group; ++head)
      softmax_row<Isa>(s + head * kDecodeKeys, keys, keys, scale, key == 0, top + head, sum + head, o + head * dh, dh);
    for (int64_t i = 0; i < keys; ++i) {
      const E* v = decode.v.row(key + i) + kv_head * dh;
      for (int64_t head = 0; head < group; ++head) {
        const L p(s[head * kDecodeKeys + i]);
        float* row = o + head * dh;
        for (int64_t j = 0; j < dh; j += L::width) store<Isa>(row + j, fma(p, load<Isa>(v + j), load<Isa>(row + j)));
      }
    }
  }
  for (int64_t head = 0; head < group; ++head)
    for (int64_t j = 0; j < dh; j += L::width)
      store<Isa>(decode.out + (kv_head * group + head) * dh + j, load<Isa>(o + head * dh + j) / L(sum[head]));
}

template void attend<isa::CODA_ISA>(const Forward<float>&, const QueryChunk&, float*);
template void attend<isa::CODA_ISA>(const Forward<bf16>&, const QueryChunk&, float*);
template void attend_backward<isa::CODA_ISA>(const Backward<float>&, const KeyChunk&, float*);
template void attend_backward<isa::CODA_ISA>(const Backward<bf16>&, const KeyChunk&, float*);
template void attend_one<isa::CODA_ISA>(const Decode<float>&, int64_t, float*);
template void attend_one<isa::CODA_ISA>(const Decode<bf16>&, int64_t, float*);

}  // namespace coda::llama::detail
