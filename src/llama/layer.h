// One Llama layer, forward and backward: the tables of DESIGN section 5, row by row. Every row is one product with a program
// in its epilogue; only attention and B4 are kernels of their own.
//
//      product      program                                           stores
//  F4  h W̃qkvᵀ      q, k: rotate(r⊙acc, position); v: r⊙acc            qkv
//      attention                                                      attention, log_sum_exp
//  F1  a Woᵀ        h_mid = acc + h; RowSum h_mid²                     h_mid, r_mid
//  F2  h_mid W̃guᵀ   z = r_mid⊙acc; y = silu(z.gate)·z.up               gate_up, y
//  F3  y Wdᵀ        h_next = acc + h_mid; RowSum h_next²               h_next, its r
//
//  B3  d_h_next Wd  dz = vjp(swiglu, z, acc); RowSum dz·z; y again     r_mid·dz, y
//  B2  dz' W̃gu      d_h_mid = acc − r_mid²·s·h_mid + d_h_next          d_h_mid
//  B1  d_h_mid Wo   da = acc                                           d_attention
//      attention's backward                                           d_qkv
//  B4  elementwise  rotate⁻¹ on dq, dk, times r; RowSum dy·y            d_qkv', in place
//      d_qkv' W̃qkv  d_h = acc − r²·s·h + d_h_mid                       d_h
//  W   d_h_nextᵀ y, dz'ᵀ h_mid, d_h_midᵀ a, d_qkv'ᵀ h                   gradients of the folded weights
//
// W̃ is a weight with the gamma of the norm in front of it folded into its columns; rows of gate-up, q and k are in packed
// order (coda/interleave.h). One text runs on both engines: Engine is Cpu, with E float or bf16, or Gpu, with bf16
// (src/llama/gpu).
#pragma once
#include <span>

#include "buffer.h"
#include "coda/cpu.h"
#include "config.h"

namespace coda {
struct Swiglu;
}

namespace coda::llama {

/// Memory of an engine, and what its attention takes to know where documents begin.
template <class Engine>
struct EngineTraits;
template <>
struct EngineTraits<Cpu> {
  template <class T>
  using Buffer = coda::Buffer<T>;
  using Documents = std::span<const int64_t>;  // [documents + 1]  first tokens, and M
};
template <class Engine, class T>
using BufferOn = typename EngineTraits<Engine>::template Buffer<T>;

/// Where the tokens of a pass stand.
template <class Engine>
struct Places {
  typename EngineTraits<Engine>::Documents documents;
  Vector<const int32_t> positions;  // [M]
  Vector<const float> turns_high;   // [qkv_width/2]  rotary frequencies in turns per position, two floats;
  Vector<const float> turns_low;    //                0 for the pairs of v
};

template <class E>
struct LayerWeights {
  Matrix<const E> qkv;      // [qkv_width, d]  gamma folded, q and k packed
  Matrix<const E> o;        // [d, query_width]
  Matrix<const E> gate_up;  // [2F, d]  gamma folded, packed
  Matrix<const E> down;     // [d, F]
};

/// Gradients of the same, of the folded weights where they are folded.
struct LayerGradients {
  Matrix<float> qkv, o, gate_up, down;
};

/// A residual stream where a norm reads it.
template <class E>
struct Stream {
  Matrix<E> h;            // [M, d]
  Vector<float> inv_rms;  // [M]
  operator Stream<const E>() const { return {h, inv_rms}; }
};
template <class E>
struct Stream<const E> {
  Matrix<const E> h;
  Vector<const float> inv_rms;
};

/// What a layer's MLP leaves for its backward pass, besides attention's output. y is made again.
template <class E>
struct MlpTape {
  Matrix<E> h_mid;            // [M, d]
  Vector<float> inv_rms_mid;  // [M]
  Matrix<E> gate_up;          // [M, 2F]  empty: not kept
};

/// What the forward pass leaves for the backward pass, besides the stream at the layer's input. Kept: z and the stream in
/// the middle.
template <class Engine, class E>
struct LayerTape {
  LayerTape(const Config& config, int64_t tokens, bool keep);
  MlpTape<E> mlp(int64_t tokens, bool keep) {
    return {h_mid.top(tokens), inv_rms_mid.vector(tokens), keep ? gate_up.top(tokens) : Matrix<E>{}};
  }
  BufferOn<Engine, E> qkv;              // [M, qkv_width]
  BufferOn<Engine, E> attention;        // [M, query_width]
  BufferOn<Engine, float> log_sum_exp;  // [heads, M]  if kept
  BufferOn<Engine, E> h_mid;            // [M, d]
  BufferOn<Engine, float> inv_rms_mid;  // [M]
  BufferOn<Engine, E> gate_up;          // [M, 2F]  if kept
};

/// Memory that one half of a layer needs while it runs.
template <class E>
struct LayerScratch {
  Matrix<float> partial;   // [slots, M]  of a row reduction
  Vector<float> mean_dot;  // [M]
  Matrix<E> y;             // [M, F]
  Matrix<E> d_gate_up;     // [M, 2F]
};

/// Memory that layers use one after the other.
template <class Engine, class E>
struct LayerWorkspace {
  LayerWorkspace(const Config& config, int64_t tokens, bool backward);
  LayerScratch<E> scratch(int64_t tokens, bool backward) {
    return {partial.matrix(), mean_dot.vector(tokens), y.top(tokens), backward ? d_gate_up.top(tokens) : Matrix<E>{}};
  }
  BufferOn<Engine, float> partial;   // [slots, M]  of a row reduction
  BufferOn<Engine, float> mean_dot;  // [M]
  BufferOn<Engine, E> y;             // [M, F]
  BufferOn<Engine, E> d_gate_up;     // [M, 2F]
  BufferOn<Engine, E> d_h_mid;       // [M, d]
  BufferOn<Engine, E> d_attention;   // [M, query_width]
  BufferOn<Engine, E> d_qkv;         // [M, qkv_width]
};

/// From the stream in front of the layer to the stream behind it. keep: fill the tape for a backward pass; otherwise
/// gate_up and log_sum_exp are not written.
template <class Engine, class E>
void layer_forward(Engine& engine, const Config& config, const Places<Engine>& places, const LayerWeights<E>& weights,
                   Stream<const E> in, LayerTape<Engine, E>& tape, LayerWorkspace<Engine, E>& workspace, bool keep,
                   Stream<E> out);

/// The parts of a forward pass on either side of attention, for callers with an attention of their own: F4, and F1 to F3 with
/// the r of the norm behind them. Widths are those of the matrices. Function: of gate and up (coda/programs/activation.h); a tape without
/// gate_up needs it to be Swiglu.
template <class Engine, class E>
void qkv_forward(Engine& engine, const Places<Engine>& places, const LayerWeights<E>& weights, Stream<const E> in,
                 Matrix<E> qkv);
template <class Engine, class E, class Function = Swiglu>
void mlp_forward(Engine& engine, double rms_eps, const LayerWeights<E>& weights, Matrix<const E> h_in,
                 Matrix<const E> attention, const MlpTape<E>& tape, const LayerScratch<E>& scratch, Stream<E> out);

/// d_h holds dL/d(stream behind the layer) and receives dL/d(stream in front of it). Weight gradients are stored, or added to
/// what is there.
template <class Engine, class E>
void layer_backward(Engine& engine, const Config& config, const Places<Engine>& places, const LayerWeights<E>& weights,
                    Stream<const E> in, LayerTape<Engine, E>& tape, LayerWorkspace<Engine, E>& workspace, Matrix<E> d_h,
                    const LayerGradients& gradients, bool add);

/// The parts of a backward pass on either side of attention's: B3 to B1, and B4. A gradient without data is not computed.
template <class Engine, class E, class Function = Swiglu>
void mlp_backward(Engine& engine, const LayerWeights<E>& weights, Matrix<const E> attention, const MlpTape<E>& tape,
                  const LayerScratch<E>& scratch, Matrix<const E> d_h_next, Matrix<E> d_h_mid, Matrix<E> d_attention,
                  const LayerGradients& gradients, bool add);
/// d_products: what the products of wq, wk and wv read, turned back and times r; may be d_qkv's memory. d_residual: what else reaches
/// in.h, or without data; d_h may be its memory.
template <class Engine, class E>
void qkv_backward(Engine& engine, const Places<Engine>& places, const LayerWeights<E>& weights, Stream<const E> in,
                  Matrix<const E> qkv, const LayerScratch<E>& scratch, Matrix<const E> d_qkv, Matrix<E> d_products,
                  Matrix<const E> d_residual, Matrix<E> d_h, Matrix<float> d_weight, bool add);

/// A product whose depth are tokens; an engine may have a way of its own for it.
template <class Engine, class A, class B, class P>
void gemm_over_tokens(Engine& engine, const A& a, const B& b, const P& program) {
  gemm(engine, a, b, program);
}

/// out (+)= aᵀ b over tokens: a weight gradient in float.
template <class Engine, class E>
void weight_gradient(Engine& engine, Matrix<const E> a, Matrix<const E> b, Matrix<float> out, bool add);

}  // namespace coda::llama
