// What ThreadSanitizer is told in all programs built with it; TSAN_OPTIONS adds to it.
//
// Copies that a library makes which was built without it (a parser appends the bytes of a message to a string) are not
// looked at: what orders them is not visible, so each 8 bytes of a message of 12 MiB would be a race to look into
// before it is suppressed, and a call would take over a minute. Locks and threads of such libraries are still seen, as
// are all accesses of our own code.
extern "C" const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1 suppressions=" STOKER_TSAN_SUPPRESSIONS;
}
