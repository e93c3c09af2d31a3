// The pieces of attention that run on SIMD lanes, each the work of one thread at a time: compiled once per instruction set in
// src/kernels/attention.cc, put together in attention.cc.
//
// A block of queries is cut into tiles of 16 tokens of one head. The heads that share keys lie side by side, tile by tile
// (tile, head, token), so that their products are one product and the causal border still falls between tiles.
#pragma once
#include <atomic>
#include <cstdint>

#include "attention.h"
#include "coda/isa.h"
#include "cpu/microkernel.h"

namespace coda::llama::detail {

constexpr int64_t kTile = 16;  // tokens; every size in tokens below is a multiple of it

/// Heads of a group that are taken together, and how many tokens at a time. Never depends on the number of threads.
struct Blocking {
  int64_t heads_together;  // divides heads / kv_heads
  int64_t strip_tokens;    // forward: query tokens of one product
  int64_t query_chunk;     // forward: query tokens of one thread's work, whole strips
  int64_t key_block;       // forward: keys between two corrections of the running maximum
  int64_t query_block;     // backward: query tokens of one product
  int64_t key_strip;       // backward: keys of one product
  int64_t key_chunk;       // backward: keys of one thread's work, whole query blocks

  int64_t strip_rows() const { return strip_tokens * heads_together; }
  int64_t query_columns() const { return query_block * heads_together; }
};

struct Document {
  int64_t start;   // its first token
  int64_t tokens;  // > 0
};

// ---- forward ----------------------------------------------------------------------------------------------------------

/// The products of a strip of queries with 16, 32, … key_block keys: entry i is for 16 (i + 1).
struct ForwardProducts {
  const cpu::Microkernel* scores;        // s = q kᵀ
  const cpu::Microkernel* first_values;  // o = p v
  const cpu::Microkernel* more_values;   // o += p v
};

template <class E>
struct Forward {
  AttentionShape shape;
  Blocking blocking;
  ForwardProducts products;
  Matrix<const E> qkv;        // [M, (heads + 2 kv_heads)·dh]
  Matrix<E> out;              // [M, heads·dh]
  Matrix<float> log_sum_exp;  // [heads, M], or data null
};

/// Query tokens [first, first + query_chunk) of a document, of the heads that share one key head.
struct QueryChunk {
  Document document;
  int64_t kv_head;
  int64_t first;
};

int64_t forward_scratch_floats(const AttentionShape& shape, const Blocking& blocking);

template <class Isa, class E>
void attend(const Forward<E>& forward, const QueryChunk& chunk, float* scratch);

// ---- backward ---------------------------------------------------------------------------------------------------------

/// The products of a strip of keys with a block of queries, transposed: s, p and d_s are [keys, queries].
struct BackwardProducts {
  cpu::Microkernel scores;   // sᵀ = k qᵀ, and d_pᵀ = v d_outᵀ
  cpu::Microkernel keys;     // d_k += d_sᵀ q, and d_v += pᵀ d_out
  cpu::Microkernel queries;  // d_qᵀ += kᵀ d_sᵀ
};

/// How far the work on a chunk of keys has come, for the chunk after it to add to the gradients of the same queries.
struct Progress {
  std::atomic<int64_t> tokens{0};  // query tokens below this are done

  void reach(int64_t done);
  void wait_for(int64_t needed) const;
};

template <class E>
struct Backward {
  AttentionShape shape;
  Blocking blocking;
  const BackwardProducts* by_keys;   // entry i: 16 (i + 1) keys, whole query blocks; up to key_strip
  const BackwardProducts* by_tiles;  // entry i: 16 keys, the last i + 1 tiles of a query block
  Matrix<const E> qkv;               // [M, (heads + 2 kv_heads)·dh]
  Matrix<const E> out;               // [M, heads·dh]
  Matrix<const E> d_out;             // [M, heads·dh]
  Matrix<const float> log_sum_exp;   // [heads, M]
  Matrix<E> d_qkv;                   // [M, (heads + 2 kv_heads)·dh]
  Matrix<float> d_q_sum;             // [M, heads·dh]  read and written for documents of several chunks only
};

/// Keys [first, first + key_chunk) of a document, of one key head: d_k and d_v of these keys, and their part of d_q of every
/// query that sees them. The parts of d_q are added in ascending order of chunks.
struct KeyChunk {
  Document document;
  int64_t kv_head;
  int64_t first;
  const Progress* previous;  // the chunk before it, null for the first
  Progress* own;
};

int64_t backward_scratch_floats(const AttentionShape& shape, const Blocking& blocking);

template <class Isa, class E>
void attend_backward(const Backward<E>& backward, const KeyChunk& chunk, float* scratch);

// ---- one token ----------------------------------------------------------------------------------------------------------

template <class E>
struct Decode {
  AttentionShape shape;
  const E* q;         // [heads·dh]
  Matrix<const E> k;  // [T, kv_heads·dh]
  Matrix<const E> v;  // [T, kv_heads·dh]
  E* out;             // [heads·dh]
};

constexpr int64_t kDecodeKeys = 64;  // between two corrections of the running maximum
int64_t decode_scratch_floats(const AttentionShape& shape);

template <class Isa, class E>
void attend_one(const Decode<E>& decode, int64_t kv_head, float* scratch);

}  // namespace coda::llama::detail
