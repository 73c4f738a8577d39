// A driver that the test plays: its allocations are files in memory and its address ranges are mappings, so the memory
// works as the real one does. It counts what is held, and fails where it is told to.
//
// Thread safety: the functions of the table may be called by any thread.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/cuda/pool_driver.h"

namespace stoker::kernels::cuda {

class FakeDriver {
 public:
  // Allocations must be asked for on such a location, number `node`.
  FakeDriver(CUmemLocationType location, size_t granularity) {
    table_->device_get_attribute = [this](int* value, CUdevice_attribute attribute, CUdevice) {
      *value = attribute == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID ? node : supported;
      return CUDA_SUCCESS;
    };
    table_->get_allocation_granularity = [this, granularity](size_t* bytes, const CUmemAllocationProp*,
                                                             CUmemAllocationGranularity_flags) {
      *bytes = granularity;
      return Call("granularity");
    };
    table_->address_reserve = [this](CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
      if (const CUresult result = Call("reserve"); result != CUDA_SUCCESS) return result;
      void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      *address = reinterpret_cast<CUdeviceptr>(range);
      return Take("range");
    };
    table_->address_free = [this](CUdeviceptr address, size_t bytes) {
      munmap(reinterpret_cast<void*>(address), bytes);
      return Give("range");
    };
    table_->create = [this, location](CUmemGenericAllocationHandle* handle, size_t bytes,
                                      const CUmemAllocationProp* properties, unsigned long long) {
      EXPECT_EQ(properties->location.type, location);
      EXPECT_EQ(properties->requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      EXPECT_EQ(properties->location.id, node);
      if (const CUresult result = Call("create"); result != CUDA_SUCCESS) return result;
      const int file = memfd_create("fake", MFD_CLOEXEC);
      EXPECT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
      *handle = static_cast<CUmemGenericAllocationHandle>(file);
      return Take("allocation");
    };
    table_->release = [this](CUmemGenericAllocationHandle handle) {
      close(static_cast<int>(handle));
      return Give("allocation");
    };
    table_->map = [this](CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
      if (const CUresult result = Call("map"); result != CUDA_SUCCESS) return result;
      struct stat file = {};
      EXPECT_EQ(fstat(static_cast<int>(handle), &file), 0);
      if (static_cast<size_t>(file.st_size) != bytes) return CUDA_ERROR_INVALID_VALUE;
      EXPECT_NE(mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     static_cast<int>(handle), 0),
                MAP_FAILED);
      return Take("mapping");
    };
    table_->unmap = [this](CUdeviceptr address, size_t bytes) {
      EXPECT_NE(
          mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
          MAP_FAILED);
      return Give("mapping");
    };
    table_->set_access = [this](CUdeviceptr, size_t, const CUmemAccessDesc* access, size_t count) {
      std::set<std::pair<int, int>> who;
      for (size_t i = 0; i < count; ++i) who.insert({access[i].location.type, access[i].location.id});
      const std::lock_guard lock(mutex_);
      accesses.insert(who);
      return CallLocked("access");
    };
    table_->export_handle = [this](void* descriptor, CUmemGenericAllocationHandle handle,
                                   CUmemAllocationHandleType type, unsigned long long) {
      EXPECT_EQ(type, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      if (const CUresult result = Call("export"); result != CUDA_SUCCESS) return result;
      *static_cast<int*>(descriptor) = dup(static_cast<int>(handle));
      return CUDA_SUCCESS;
    };
    table_->import_handle = [this](CUmemGenericAllocationHandle* handle, void* descriptor, CUmemAllocationHandleType) {
      if (const CUresult result = Call("import"); result != CUDA_SUCCESS) return result;
      *handle =
          static_cast<CUmemGenericAllocationHandle>(dup(static_cast<int>(reinterpret_cast<intptr_t>(descriptor))));
      return Take("allocation");
    };
    table_->set_device = [](int) { return cudaSuccess; };
    table_->host_register = [this](void* data, size_t bytes, unsigned flags) {
      EXPECT_EQ(flags, cudaHostRegisterPortable | cudaHostRegisterMapped);
      if (Call("register") != CUDA_SUCCESS) return cudaErrorMemoryAllocation;
      const std::lock_guard lock(mutex_);
      registered[data] = bytes;
      ++held_["registration"];
      return cudaSuccess;
    };
    table_->host_unregister = [this](void* data) {
      const std::lock_guard lock(mutex_);
      EXPECT_EQ(registered.erase(data), 1);
      --held_["registration"];
      return cudaSuccess;
    };
  }

  PoolDriver& table() { return *table_; }
  std::shared_ptr<const PoolDriver> shared() { return table_; }
  // The call number `nth` of that name, counted from now and from 0, fails; and none else.
  void FailAt(std::string call, int nth) {
    fail_call_ = std::move(call);
    fail_at_ = nth;
    calls_.clear();
  }
  int calls(const std::string& name) { return calls_[name]; }
  // Nothing is held any more.
  testing::AssertionResult AllGivenBack() {
    for (const auto& [what, count] : held_) {
      if (count != 0) return testing::AssertionFailure() << count << " of kind " << what << " are held";
    }
    return testing::AssertionSuccess();
  }

  int supported = 1;
  int node = 0;
  std::set<std::set<std::pair<int, int>>> accesses;
  std::map<void*, size_t> registered;

 private:
  CUresult CallLocked(const char* name) {
    const int nth = calls_[name]++;
    return fail_call_ == name && nth == fail_at_ ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  }
  CUresult Call(const char* name) {
    const std::lock_guard lock(mutex_);
    return CallLocked(name);
  }
  CUresult Take(const char* what) {
    const std::lock_guard lock(mutex_);
    ++held_[what];
    return CUDA_SUCCESS;
  }
  CUresult Give(const char* what) {
    const std::lock_guard lock(mutex_);
    --held_[what];
    return CUDA_SUCCESS;
  }

  const std::shared_ptr<PoolDriver> table_ = std::make_shared<PoolDriver>();
  std::mutex mutex_;
  std::map<std::string, int> calls_;
  std::map<std::string, int> held_;
  std::string fail_call_;
  int fail_at_ = -1;
};

inline int OpenDescriptors() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++count;
  }
  return count;
}

}  // namespace stoker::kernels::cuda
