// The command line of stoker-replay. Every option is declared once, in options.cc, with its help and limits; parsing,
// range checks and --help are made from that table.
//
// Thread safety: values and free functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/replay/row_oracle.h"
#include "client/replay/workload_model.h"

namespace stoker::replay {

struct Options {
  enum class Action {
    kReplay,         // requests through a daemon
    kPrefixOnly,     // --prefix-only
    kDriveWorkload,  // --workload
    kWriteWorkload,  // --write-workload
    kWriteTrace,     // --write-trace
    kHelp,
    kVersion,
  };

  Action action = Action::kReplay;

  // Daemon.
  std::string server;
  std::string stokerd;
  std::string pool = "replay";
  std::string device = "auto";
  // Requests.
  std::string trace;
  uint32_t requests = 0;
  uint32_t input_rows = 2000;
  uint32_t output_rows = 64;
  double time_scale = 0;
  uint64_t seed = 1;
  // Engines.
  uint32_t concurrency = 32;
  uint32_t query_rows = 1;
  uint32_t padding_rows = 0;
  uint32_t engines = 1;
  uint32_t ranks = 1;
  // Model.
  uint32_t layers = 1;
  uint32_t groups = 1;
  std::string row_layout = "linear";
  uint32_t row_bytes = 0;
  uint32_t v_row_bytes = 0;
  uint32_t top_k = 64;
  uint32_t hot_rows = 0;
  std::string index_space = "position";
  std::string workload_model;
  uint32_t drift_percent = 100;
  uint32_t white_percent = 100;
  // Pool.
  uint32_t pool_blocks = 0;
  uint32_t block_rows = 64;
  std::string transfer = "auto";
  std::string plane = "auto";
  std::string arena = "auto";
  // Output.
  bool json = false;
  std::string progress = "auto";
  // Other things to do.
  bool prefix_only = false;
  std::string write_trace;
  std::string write_workload;
  uint32_t steps = 48;
  uint32_t rows = 4;
  uint32_t context = 0;
  std::string workload;
  std::string dump_slots;

  // What follows from the above.
  RowShape row_shape() const;
  uint32_t batch_rows() const { return concurrency * query_rows + padding_rows; }  // of a step, at most
  bool by_pool_row() const { return index_space == "pool_row"; }
  ModelKind model() const;
  ScoreNoise noise() const {
    return {static_cast<float>(drift_percent) / 100, static_cast<float>(white_percent) / 100};
  }
  // Layers [first, first + count) of an index group; groups differ by at most one layer.
  uint32_t GroupBegin(uint32_t group) const { return static_cast<uint32_t>(uint64_t{layers} * group / groups); }
};

// Reads the arguments behind the program's name: "--name=value", "--name value", and "--name" or "--no-name" for
// switches. Fills in defaults that depend on others. INVALID_ARGUMENT: the message names option, value and limit.
absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments);

// What --help prints.
std::string OptionsHelp();

}  // namespace stoker::replay
