// Generators, device guard and hooks: what torch core asks of a device type.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.hpp"

namespace {

struct NpuGenerator : public at::CPUGeneratorImpl {
  explicit NpuGenerator(c10::DeviceIndex i) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kNpu, i);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  static c10::DeviceType device_type() { return kNpu; }
};
std::vector<at::Generator>& default_generators() {
  static std::vector<at::Generator> g = [] {
    std::vector<at::Generator> v;
    for (int i = 0; i < 16; ++i) v.push_back(at::make_generator<NpuGenerator>(i));
    return v;
  }();
  return g;
}

// --------------------------------------------------------------- the guard
struct NpuGuard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNpu;
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {kNpu, g_current}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < device_count(), "fake npu: invalid device ", d);
    if (d.index() >= 0) g_current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) g_current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard);

struct NpuHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { g_current = d; }
  c10::DeviceIndex getCurrentDevice() const override { return g_current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto o = g_current; if (d >= 0) g_current = d; return o;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    return default_generators().at(i < 0 ? g_current : i);
  }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<NpuGenerator>(i < 0 ? g_current : i);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  bool isPinnedPtr(const void* p) const override { return PinnedAllocator::owns(p); }
  at::Device getDeviceFromPtr(void*) const override { return {kNpu, g_current}; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* impl = s.unsafeGetStorageImpl();
    auto fresh = g_allocator.allocate(n);
    if (impl->data() && n) std::memcpy(fresh.get(), impl->data(), std::min(n, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};

}  // namespace
