// Memory of the simulated device: host memory, counted, and poisoned when it is freed.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex g_current = 0;

c10::DeviceIndex device_count() {
  const char* v = std::getenv("FAKE_NPU_COUNT");
  long n = v ? std::strtol(v, nullptr, 10) : 1;
  return static_cast<c10::DeviceIndex>(n < 0 ? 0 : n);
}

std::atomic<int64_t> g_allocated{0};
std::atomic<int64_t> g_peak{0};

struct Block { void* p; size_t n; };
void free_block(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  g_allocated -= static_cast<int64_t>(b->n);
  // Never reused: whoever reads it through a pointer that torch_npu left behind meets NaN.
  std::memset(b->p, 0xFF, b->n);
  delete b;
}
struct NpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device d(kNpu, g_current);
    if (n == 0) return {nullptr, nullptr, &free_block, d};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "fake npu: out of memory");
    auto* b = new Block{p, n};
    auto now = (g_allocated += static_cast<int64_t>(n));
    auto peak = g_peak.load();
    while (now > peak && !g_peak.compare_exchange_weak(peak, now)) {}
    return {p, b, &free_block, d};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t n) const override {
    std::memcpy(dst, src, n);
  }
};
NpuAllocator g_allocator;

struct PinnedAllocator final : c10::Allocator {
  static std::map<void*, size_t>& live() { static std::map<void*, size_t> m; return m; }
  static std::mutex& mu() { static std::mutex m; return m; }
  static void release(void* p) {
    { std::lock_guard<std::mutex> g(mu()); live().erase(p); }
    std::free(p);
  }
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "fake npu: out of pinned memory");
    { std::lock_guard<std::mutex> g(mu()); live()[p] = n; }
    return {p, p, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dst, const void* src, size_t n) const override {
    std::memcpy(dst, src, n);
  }
  static bool owns(const void* p) {
    std::lock_guard<std::mutex> g(mu());
    auto it = live().upper_bound(const_cast<void*>(p));
    if (it == live().begin()) return false;
    --it;
    return static_cast<const char*>(p) < static_cast<const char*>(it->first) + it->second;
  }
};
PinnedAllocator g_pinned;

}  // namespace
