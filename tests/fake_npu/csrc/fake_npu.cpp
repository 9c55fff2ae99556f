// A simulated "npu" (PrivateUse1) device that lives in host memory.
//
// Own code, written against the public torch C++ extension API only: nothing from torch_npu,
// CANN or torch_openreg is copied here. One translation unit, since torch's headers take most
// of the time that it compiles.
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/extension.h>

#include "operators.hpp"

// ---------------------------------------------------------------- autocast
namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define FAKE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FAKE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FAKE_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FAKE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER)
  AT_FORALL_FP32(FAKE_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FAKE_FP32_SET)
  AT_FORALL_PROMOTE(FAKE_PROMOTE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}
}  // namespace at::autocast

// ------------------------------------------------- torch_npu's primitives
namespace {
int64_t storage_numel(const at::Tensor& t) {
  return static_cast<int64_t>(t.storage().nbytes() / t.element_size());
}
// dst's bytes become src's bytes from element `index` on. As the real one it keeps a raw pointer
// that owns nothing: it dangles as soon as src is gone.
void change_data_ptr(at::Tensor dst, const at::Tensor& src, int64_t index) {
  TORCH_CHECK(dst.scalar_type() == src.scalar_type(), "change_data_ptr: dtype differs");
  auto* p = static_cast<char*>(src.storage().mutable_data()) + index * src.element_size();
  c10::DataPtr dp(p, src.device());
  dst.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(dp));
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(kNpu, &g_allocator);
  static NpuHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", [] { return int(device_count()); });
  m.def("current_device", [] { return int(g_current); });
  m.def("set_device", [](int i) {
    TORCH_CHECK(i >= 0 && i < device_count(), "fake npu: invalid device ordinal ", i);
    g_current = static_cast<c10::DeviceIndex>(i);
  });
  m.def("default_generator", [](int i) { return default_generators().at(i); });
  m.def("memory_allocated", [] { return g_allocated.load(); });
  m.def("max_memory_allocated", [] { return g_peak.load(); });
  m.def("reset_peak", [] { g_peak = g_allocated.load(); });
  m.def("get_storage_size", &storage_numel);
  m.def("change_data_ptr", &change_data_ptr);
  m.def("cpu_alias", &as_cpu);
}
