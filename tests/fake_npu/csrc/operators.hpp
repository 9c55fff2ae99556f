// Operators: memory and views by hand, all others by torch's own CPU kernels.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.hpp"

namespace {

c10::Device pick(c10::optional<c10::Device> d) {
  if (!d || !d->has_index()) return {kNpu, g_current};
  return *d;
}
at::Tensor npu_empty(c10::IntArrayRef size, c10::optional<at::ScalarType> dt, c10::optional<at::Layout>,
                     c10::optional<at::Device> dev, c10::optional<bool>, c10::optional<at::MemoryFormat> mf) {
  auto d = pick(dev);
  TORCH_CHECK(d.index() < device_count(), "fake npu: invalid device ordinal ", int(d.index()));
  c10::DeviceGuard g(d);
  return at::detail::empty_generic(size, &g_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dt), mf);
}
at::Tensor npu_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::optional<at::ScalarType> dt,
                             c10::optional<at::Layout>, c10::optional<at::Device> dev, c10::optional<bool>) {
  auto d = pick(dev);
  TORCH_CHECK(d.index() < device_count(), "fake npu: invalid device ordinal ", int(d.index()));
  c10::DeviceGuard g(d);
  return at::detail::empty_strided_generic(size, stride, &g_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dt));
}

// A CPU tensor over the same bytes: no copy, so in-place ops land directly.
at::Tensor as_cpu(const at::Tensor& t) {
  if (!t.defined() || t.device().type() != kNpu) return t;
  auto opts = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0 && t.storage().nbytes() == 0) return at::empty_strided(t.sizes(), t.strides(), opts);
  auto keep = t.storage();  // keeps the bytes alive while the alias lives
  auto out = at::from_blob(const_cast<void*>(keep.data()), {0}, [keep](void*) {}, opts);
  out.storage().unsafeGetStorageImpl()->set_nbytes(keep.nbytes());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor npu_copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
const at::Tensor& npu_resize_(const at::Tensor& self, c10::SymIntArrayRef size, c10::optional<at::MemoryFormat> mf);
at::Tensor npu_copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  as_cpu(dst).copy_(as_cpu(self));
  return dst;
}
at::Scalar npu_item(const at::Tensor& self) { return as_cpu(self).item(); }
const at::Tensor& npu_resize_(const at::Tensor& self, c10::SymIntArrayRef ssize, c10::optional<at::MemoryFormat> mf) {
  auto size = C10_AS_INTARRAYREF_SLOW(ssize);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t need = (impl->storage_offset() + impl->numel()) * self.element_size();
  if (need > self.storage().nbytes()) NpuHooks().resizePrivateUse1Bytes(self.storage(), need);
  if (mf) impl->empty_tensor_restride(*mf);
  return self;
}
at::Tensor& npu_set_storage(at::Tensor& self, at::Storage s, int64_t off, c10::IntArrayRef sz, c10::IntArrayRef st) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  impl->set_storage_offset(off);
  if (st.empty()) impl->set_sizes_contiguous(sz); else impl->set_sizes_and_strides(sz, st);
  return self;
}
at::Tensor& npu_set_src_storage(at::Tensor& self, at::Storage s) {
  int64_t n = static_cast<int64_t>(s.nbytes() / self.element_size());
  return npu_set_storage(self, std::move(s), 0, {n}, {});
}
at::Tensor& npu_set_src_tensor(at::Tensor& self, const at::Tensor& src) {
  return npu_set_storage(self, src.storage(), src.storage_offset(), src.sizes(), src.strides());
}

// Core leaves these two to the backend (they raise otherwise).
at::Tensor to_npu(const at::Tensor& t, c10::Device d) { return t.defined() ? t.to(d) : t; }
at::Tensor npu_conv(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                    c10::SymIntArrayRef st, c10::SymIntArrayRef pad, c10::SymIntArrayRef dil, bool tr,
                    c10::SymIntArrayRef op, c10::SymInt groups) {
  auto r = at::convolution_symint(as_cpu(x), as_cpu(w), b ? std::optional<at::Tensor>(as_cpu(*b)) : b, st, pad, dil,
                                  tr, op, groups);
  return to_npu(r, x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> npu_conv_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef st, c10::SymIntArrayRef pad,
    c10::SymIntArrayRef dil, bool tr, c10::SymIntArrayRef op, c10::SymInt groups, std::array<bool, 3> mask) {
  c10::SymInt cout = tr ? w.sym_size(1) * groups : w.sym_size(0);
  auto r = at::convolution_backward_symint(as_cpu(g), as_cpu(x), as_cpu(w), c10::SymIntArrayRef(&cout, 1), st, pad,
                                           dil, tr, op, groups, mask);
  auto d = x.device();
  return {to_npu(std::get<0>(r), d), to_npu(std::get<1>(r), d), to_npu(std::get<2>(r), d)};
}

void npu_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&npu_fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(npu_empty));
  m.impl("empty_strided", TORCH_FN(npu_empty_strided));
  m.impl("_copy_from", TORCH_FN(npu_copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(npu_copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(npu_item));
  m.impl("resize_", TORCH_FN(npu_resize_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage", TORCH_FN(npu_set_src_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(npu_set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(npu_set_src_tensor));
  m.impl("convolution_overrideable", TORCH_FN(npu_conv));
  m.impl("convolution_backward_overrideable", TORCH_FN(npu_conv_backward));
}

// As on the real device: CPU <-> npu moves keep the Parameter object, so an
// optimizer made before model.to("npu") still owns the right tensors.
namespace {
bool npu_shallow_ok(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.is_cpu() || t.device().type() == kNpu);
  };
  return a.key_set() == b.key_set() || (dense(a) && dense(b));
}
}  // namespace
TORCH_LIBRARY_IMPL(aten, CatchAll, m) { m.impl("_has_compatible_shallow_copy_type", TORCH_FN(npu_shallow_ok)); }
