// Finds a function of the driver when the process runs: a program starts where there is no driver.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace stoker::kernels::cuda {

// The interface of this version is asked for: with it came cuMemCreate on a host NUMA node.
inline constexpr unsigned kDriverVersion = 12020;

// Leaves `function` empty where the driver lacks it. Initializes the driver.
template <typename Function>
void FindDriverFunction(const char* name, std::function<Function>* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kDriverVersion, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error == cudaSuccess && result == cudaDriverEntryPointSuccess && address != nullptr) {
    *function = reinterpret_cast<Function*>(address);
  }
}

}  // namespace stoker::kernels::cuda
