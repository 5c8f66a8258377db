// Lets torch believe that it knows CUDA: one device, on which nothing ever runs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct PretendGuard final : public impl::DeviceGuardImplInterface {
  static Device dev() { return Device(DeviceType::CUDA, 0); }
  static Stream str() { return Stream(Stream::DEFAULT, dev()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return dev(); }
  Device getDevice() const override { return dev(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return str(); }
  Stream getDefaultStream(Device) const override { return str(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return str(); }
  Stream getNewStream(Device, int) const override { return str(); }
  Stream exchangeStream(Stream) const noexcept override { return str(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PretendGuard)
namespace at {
struct CUDAHooks final : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
