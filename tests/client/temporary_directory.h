// A directory that lasts as long as the object.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "gtest/gtest.h"

namespace stoker::client {

class TemporaryDirectory {
 public:
  // Short, for a Unix socket's path has 107 bytes at most.
  TemporaryDirectory() : path_(testing::TempDir() + "stk.XXXXXX") { EXPECT_NE(mkdtemp(path_.data()), nullptr); }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    EXPECT_FALSE(error) << error.message();
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace stoker::client
