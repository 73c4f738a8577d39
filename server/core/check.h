// Assertions for our own bugs, on in every build. What the world can get wrong is answered with a status instead.
#pragma once

#include <cstdio>
#include <cstdlib>

#define STOKER_CHECK(condition)                                                          \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
