// Doorbells, and words that other streams read meanwhile: one thread that polls a word, or sets it.
//
// Bound of a wait: one trip to the L2 cache behind the request, and the launch of what comes next. It holds one warp of
// a multiprocessor and nothing else.
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/doorbell.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/system_memory.cuh"
#include "kernels/order_word.h"
#include "kernels/plane.h"

namespace stoker::kernels::cuda {
namespace {

// Between two looks at a word: leaves the memory system to others, and costs a step less than half of this each wait.
constexpr unsigned kPauseNs = 64;
// A wait that begins a step lasts as long as its engine is idle, and several of them look at memory beside the steps of
// others. Its pause grows with the time waited, so that it delays a step by less than 2 % of the time since the one
// before (a pause may last twice as long as it says), and in the 8 us that follow a step not at all; after 1.28 ms it
// is at its longest, and the look at the abort word, behind the link, the rarer of the two still.
constexpr unsigned kLongestPauseNs = 10'000;
constexpr uint64_t kPausesOfAWait = 128;
// Between two looks at the abort word, which is behind the link: a trip of 1 to 2 us, and longer for those who then
// wait for the link, as the end of a step does. Therefore sessions that are idle look less often, too.
constexpr uint64_t kAbortPauseNs = 20'000;
constexpr uint64_t kLongestAbortPauseNs = 500'000;

__host__ __device__ constexpr unsigned BeginPauseNs(uint64_t waited_ns) {
  const uint64_t pause_ns = waited_ns / kPausesOfAWait;
  if (pause_ns < kPauseNs) return kPauseNs;
  return pause_ns < kLongestPauseNs ? static_cast<unsigned>(pause_ns) : kLongestPauseNs;
}
static_assert(BeginPauseNs(0) == kPauseNs && BeginPauseNs(8'000) == kPauseNs && BeginPauseNs(128'000) == 1'000 &&
              BeginPauseNs(~uint64_t{0}) == kLongestPauseNs);
__device__ uint64_t AbortPauseNs(bool begins_step, uint64_t waited_ns) {
  return begins_step ? min(max(waited_ns / kPausesOfAWait, kAbortPauseNs), kLongestAbortPauseNs) : kAbortPauseNs;
}
// The contract: *abort is looked at at least every millisecond. A pause may last twice as long as it says.
static_assert(2 * kLongestPauseNs + kLongestAbortPauseNs < 1'000'000);

__device__ void End(PlaneState* state, PlaneOutcome outcome) { Store(&state->outcome, static_cast<uint32_t>(outcome)); }

__device__ uint64_t NowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void AwaitDoorbellKernel(const __grid_constant__ AwaitDoorbellArgs args) {
  WaitForEarlier();
  if (Ended(args.state)) return;
  uint64_t step = Load(&args.state->step);
  if (args.begins_step) Store(&args.state->step, ++step);
  const uint64_t limit_ns = args.begins_step ? 0 : args.limit_ns;
  const uint64_t begin_ns = NowNs();
  uint64_t looked_ns = begin_ns - kAbortPauseNs;  // at *abort: at once where the request has not come yet
  while (true) {
    // Before the request is read: one that came within the limit is found, however late this looks.
    const uint64_t now_ns = NowNs();
    const uint64_t request = LoadAcquire<kOnDevice>(args.request);
    if (request == step) return;
    const bool bad = request != step - 1;
    const bool late = limit_ns > 0 && now_ns - begin_ns >= limit_ns;
    if (bad || late || now_ns - looked_ns >= AbortPauseNs(args.begins_step, now_ns - begin_ns)) {
      looked_ns = now_ns;
      const bool aborted = LoadAcquire(args.abort) != 0;
      if (aborted || bad || late) {
        End(args.state, aborted ? PlaneOutcome::kAborted : bad ? PlaneOutcome::kBadStep : PlaneOutcome::kTimedOut);
        return;
      }
    }
    __nanosleep(args.begins_step ? BeginPauseNs(now_ns - begin_ns) : kPauseNs);
  }
}

__global__ void RingDoorbellKernel(const __grid_constant__ RingDoorbellArgs args) {
  const RingWords words = ReadRing(args);
  if (words.running()) StoreRelease(args.done, words.step);
}

__global__ void AwaitQuietKernel(const __grid_constant__ AwaitQuietArgs args) {
  FenceSequential();  // against the one of BeginBatch
  const uint64_t accepted = Load(&args.state->accepted);
  const uint64_t begin_ns = NowNs();
  uint64_t looked_ns = begin_ns;
  while (LoadAcquire(&args.state->finished) < accepted) {
    __nanosleep(kPauseNs);
    const uint64_t now_ns = NowNs();
    if (args.limit_ns > 0 && now_ns - begin_ns >= args.limit_ns) return;
    if (args.abort == nullptr || now_ns - looked_ns < kAbortPauseNs) continue;
    if (LoadAcquire(args.abort) != 0) return;
    looked_ns = now_ns;
  }
}

__global__ void LookAtAbortKernel(const uint32_t* abort, uint32_t* aborted) {
  if (LoadAcquire(abort) != 0) Store(aborted, 1u);
}

__global__ void SignalOrderKernel(const __grid_constant__ SignalOrderArgs args) {
  if (args.aborted != nullptr && Load(args.aborted) != 0) return;
  // Not lowered: who waits may have released it.
  SystemRef<uint64_t>(*args.word).fetch_max(args.number, ::cuda::memory_order_release);
}

template <typename T>
__global__ void WriteKernel(T* target, T value) {
  StoreRelease(target, value);
}

}  // namespace

cudaError_t LaunchWrite(uint64_t* target, uint64_t value, cudaStream_t stream) {
  WriteKernel<<<1, 1, 0, stream>>>(target, value);
  return cudaGetLastError();
}

cudaError_t LaunchWrite(int32_t* target, int32_t value, cudaStream_t stream) {
  WriteKernel<<<1, 1, 0, stream>>>(target, value);
  return cudaGetLastError();
}

cudaError_t LaunchAwaitDoorbell(const AwaitDoorbellArgs& args, const DeviceLimits& limits, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = stream;
  // It takes its place while the operation before it still runs.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = limits.clusters ? 1 : 0;
  return cudaLaunchKernelEx(&config, AwaitDoorbellKernel, args);
}

cudaError_t LaunchRingDoorbell(const RingDoorbellArgs& args, cudaStream_t stream) {
  RingDoorbellKernel<<<1, 1, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchLookAtAbort(const AwaitOrderArgs& args, cudaStream_t stream) {
  LookAtAbortKernel<<<1, 1, 0, stream>>>(args.abort, args.aborted);
  return cudaGetLastError();
}

cudaError_t LaunchSignalOrder(const SignalOrderArgs& args, cudaStream_t stream) {
  SignalOrderKernel<<<1, 1, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LaunchAwaitQuiet(const AwaitQuietArgs& args, cudaStream_t stream) {
  AwaitQuietKernel<<<1, 1, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace stoker::kernels::cuda
