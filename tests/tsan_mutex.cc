// Tells ThreadSanitizer of absl::Mutex: Debian's Abseil is not instrumented, so every access under one of its mutexes
// would look like a race. The linker passes calls of our objects through here (--wrap, see tests/core/CMakeLists.txt).
#include <sanitizer/tsan_interface.h>

extern "C" {

void __real__ZN4absl7debian35Mutex4LockEv(void* mutex);
void __real__ZN4absl7debian35Mutex6UnlockEv(void* mutex);

void __wrap__ZN4absl7debian35Mutex4LockEv(void* mutex) {
  __tsan_mutex_pre_lock(mutex, 0);
  __real__ZN4absl7debian35Mutex4LockEv(mutex);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

void __wrap__ZN4absl7debian35Mutex6UnlockEv(void* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __real__ZN4absl7debian35Mutex6UnlockEv(mutex);
  __tsan_mutex_post_unlock(mutex, 0);
}

}  // extern "C"
