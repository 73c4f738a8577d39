// Requests of an engine, as Mooncake publishes them: one JSON object a line with `timestamp` (milliseconds since the
// start), `input_length` and `output_length` (tokens) and `hash_ids` (one id for each 512-token block of the input, the
// partial one at the end included or not). Equal ids are equal prefixes: an id stands for its block and all before it.
//
// Thread safety: values and free functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/replay/row_oracle.h"

namespace stoker::replay {

// Longest sequence that a session may open (AttachRequest.max_sequence_rows).
inline constexpr uint32_t kMaxSequenceRows = uint32_t{1} << 24;
// Largest integer that JSON carries without loss.
inline constexpr uint64_t kMaxTimestampMs = uint64_t{1} << 53;

struct Request {
  RequestTokens tokens() const { return {hash_ids.data(), static_cast<uint32_t>(hash_ids.size()), input_rows, number}; }
  // Whether a hash id names the block of this input position.
  bool HasHash(uint32_t position) const { return tokens().HasHash(position); }
  // Who the token at `position` is; output tokens are the request's own.
  TokenIdentity Token(uint32_t position) const { return {tokens()[position]}; }
  uint32_t total_rows() const { return input_rows + output_rows; }
  // Blocks of the input, the partial one at the end counted as one.
  uint32_t prefix_blocks() const { return (input_rows + kPrefixBlockRows - 1) / kPrefixBlockRows; }

  friend bool operator==(const Request&, const Request&) = default;

  uint32_t number = 0;  // place in the trace
  uint64_t timestamp_ms = 0;
  uint32_t input_rows = 0;
  uint32_t output_rows = 0;
  std::vector<uint64_t> hash_ids;
};

// Writes the rows [first, first + count) of one layer of a request, dense. Returns where the next row would begin.
std::byte* FillRequestRows(const RowOracle& oracle, const Request& request, uint32_t layer, uint32_t first,
                           uint32_t count, std::byte* out);

// Content hash of a prefix block for AdmitItem.block_hashes: 16 bytes that follow from the id.
void AppendBlockHash(uint64_t hash_id, std::string* out);

// Reads the first `max_requests` requests (0: all). NOT_FOUND: the file cannot be opened; INVALID_ARGUMENT: a line is
// not such an object; the message names file, line, field, value and limit.
absl::StatusOr<std::vector<Request>> ReadTrace(const std::string& path, uint64_t max_requests);
// Parses one line. `place` ("file:12") begins the message of an error.
absl::StatusOr<Request> ParseRequest(absl::string_view line, const std::string& place);

// The same format.
std::string FormatRequest(const Request& request);
absl::Status WriteTrace(const std::vector<Request>& requests, const std::string& path);

}  // namespace stoker::replay
