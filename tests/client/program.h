// Runs a program to its end.
#pragma once

#include <string>
#include <vector>

namespace stoker::client {

struct ProgramResult {
  int exit_code = -1;  // 128 and the signal's number where one ended it
  std::string out;
  std::string err;
};

// `variables` ("NAME=value") are added to the environment. Writes the output to files in `directory`.
ProgramResult RunProgram(const std::string& path, const std::vector<std::string>& arguments,
                         std::vector<std::string> variables, const std::string& directory);

}  // namespace stoker::client
