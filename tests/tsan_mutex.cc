// Makes absl::Mutex and absl::Notification visible to ThreadSanitizer. Debian's Abseil is built without it, so to the
// sanitizer they order nothing, and everything that they guard looks like a race. These definitions come before those
// of the shared library, for our code and for gRPC's: each tells the sanitizer of the order, then calls the library's.
//
// Only in builds with STOKER_SANITIZE=thread. What is modelled is the order between critical sections; what the library
// reads to evaluate conditions is left out.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);

namespace {

// The library's definition of the function at `ours`, which has the same name.
void* Next(void* ours) {
  Dl_info info;
  void* next = nullptr;
  if (dladdr(ours, &info) != 0 && info.dli_sname != nullptr) next = dlsym(RTLD_NEXT, info.dli_sname);
  if (next == nullptr) {
    std::fputs("tsan_mutex.cc: the shared library of absl::Mutex was not found\n", stderr);
    std::abort();
  }
  return next;
}

// Inside, the library evaluates conditions, its thread's own and those of waiters: it holds the mutex, but the
// sanitizer has been told that it is given up, or not yet that it is taken.
struct IgnoreReads {
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

// A member function as a plain one: `this` is its first argument.
template <typename Class, typename Result, typename... Arguments>
auto Library(Result (Class::*ours)(Arguments...)) {
  // GCC's layout: a member pointer begins with the address of the function.
  return reinterpret_cast<Result (*)(Class*, Arguments...)>(Next(*reinterpret_cast<void**>(&ours)));
}

template <typename Class, typename Result, typename... Arguments>
auto Library(Result (Class::*ours)(Arguments...) const) {
  return reinterpret_cast<Result (*)(const Class*, Arguments...)>(Next(*reinterpret_cast<void**>(&ours)));
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto library = Library(&Mutex::Lock);
  library(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  static const auto library = Library(&Mutex::Unlock);
  __tsan_release(this);
  const IgnoreReads ignore_reads;
  library(this);
}

bool Mutex::TryLock() {
  static const auto library = Library(&Mutex::TryLock);
  const bool locked = library(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  static const auto library = Library(&Mutex::ReaderLock);
  library(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  static const auto library = Library(&Mutex::ReaderUnlock);
  __tsan_release(this);
  const IgnoreReads ignore_reads;
  library(this);
}

void Mutex::Await(const Condition& condition) {
  static const auto library = Library(&Mutex::Await);
  __tsan_release(this);
  {
    const IgnoreReads ignore_reads;
    library(this, condition);
  }
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto library = Library(&Mutex::AwaitWithTimeout);
  __tsan_release(this);
  bool result;
  {
    const IgnoreReads ignore_reads;
    result = library(this, condition, timeout);
  }
  __tsan_acquire(this);
  return result;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto library = Library(&Mutex::AwaitWithDeadline);
  __tsan_release(this);
  bool result;
  {
    const IgnoreReads ignore_reads;
    result = library(this, condition, deadline);
  }
  __tsan_acquire(this);
  return result;
}

void Mutex::LockWhen(const Condition& condition) {
  static const auto library = Library(&Mutex::LockWhen);
  {
    const IgnoreReads ignore_reads;
    library(this, condition);
  }
  __tsan_acquire(this);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static const auto library = Library(&Mutex::LockWhenWithTimeout);
  bool result;
  {
    const IgnoreReads ignore_reads;
    result = library(this, condition, timeout);
  }
  __tsan_acquire(this);
  return result;
}

void Notification::Notify() {
  static const auto library = Library(&Notification::Notify);
  __tsan_release(this);
  library(this);
}

void Notification::WaitForNotification() const {
  static const auto library = Library(&Notification::WaitForNotification);
  library(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static const auto library = Library(&Notification::WaitForNotificationWithTimeout);
  const bool notified = library(this, timeout);
  if (notified) __tsan_acquire(const_cast<Notification*>(this));
  return notified;
}

ABSL_NAMESPACE_END
}  // namespace absl
