// A tree of made-up system files, for code that reads /proc and /sys below a root.
//
// Thread safety: one thread.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace stoker::kernels {

class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = testing::TempDir() + "/stoker_memory_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path file = path_ + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace stoker::kernels
