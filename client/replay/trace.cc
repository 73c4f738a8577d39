#include "client/replay/trace.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace stoker::replay {
namespace {

using google::protobuf::ListValue;
using google::protobuf::Struct;
using google::protobuf::Value;

std::string Describe(const Value& value) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(value, &text).ok()) text = "not representable";
  constexpr size_t kShown = 40;
  if (text.size() > kShown) text = absl::StrCat(text.substr(0, kShown), "...");
  return text;
}

absl::StatusOr<uint64_t> Integer(const Value& value, uint64_t min, uint64_t max, const std::string& what) {
  const double number = value.number_value();
  if (value.kind_case() != Value::kNumberValue || std::floor(number) != number ||
      !(number >= static_cast<double>(min) && number <= static_cast<double>(max))) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is ", Describe(value), "; it must be an integer from ", min, " to ", max));
  }
  return static_cast<uint64_t>(number);
}

absl::StatusOr<uint64_t> IntegerField(const Struct& object, const std::string& field, uint64_t min, uint64_t max,
                                      const std::string& place) {
  const auto it = object.fields().find(field);
  if (it == object.fields().end()) return absl::InvalidArgumentError(absl::StrCat(place, ": ", field, " is missing"));
  return Integer(it->second, min, max, absl::StrCat(place, ": ", field));
}

}  // namespace

std::byte* FillRequestRows(const RowOracle& oracle, const Request& request, uint32_t layer, uint32_t first,
                           uint32_t count, std::byte* out) {
  const uint32_t end = first + count;
  while (first < end) {
    // Identities are consecutive up to the end of the block, or of what has no hashes.
    uint32_t run_end = end;
    if (request.HasHash(first)) {
      run_end = std::min({end, request.input_rows, (first / kPrefixBlockRows + 1) * kPrefixBlockRows});
    }
    out = oracle.FillRun(layer, request.Token(first), run_end - first, out);
    first = run_end;
  }
  return out;
}

void AppendBlockHash(uint64_t hash_id, std::string* out) {
  const uint64_t words[2] = {Mix64(hash_id + kGoldenGamma), Mix64(hash_id ^ 0xa0761d6478bd642f)};
  out->append(reinterpret_cast<const char*>(words), sizeof(words));
}

absl::StatusOr<Request> ParseRequest(absl::string_view line, const std::string& place) {
  Struct object;
  const auto parsed = google::protobuf::util::JsonStringToMessage({line.data(), line.size()}, &object);
  if (!parsed.ok()) {
    const std::string detail(parsed.message().data(), parsed.message().size());
    return absl::InvalidArgumentError(
        absl::StrCat(place, ": not a JSON object: ", detail.substr(0, detail.find('\n'))));
  }
  Request request;
  auto timestamp_ms = IntegerField(object, "timestamp", 0, kMaxTimestampMs, place);
  if (!timestamp_ms.ok()) return timestamp_ms.status();
  auto input_rows = IntegerField(object, "input_length", 1, kMaxSequenceRows, place);
  if (!input_rows.ok()) return input_rows.status();
  auto output_rows = IntegerField(object, "output_length", 0, kMaxSequenceRows - *input_rows, place);
  if (!output_rows.ok()) return output_rows.status();
  request.timestamp_ms = *timestamp_ms;
  request.input_rows = static_cast<uint32_t>(*input_rows);
  request.output_rows = static_cast<uint32_t>(*output_rows);

  const auto it = object.fields().find("hash_ids");
  if (it == object.fields().end()) return absl::InvalidArgumentError(absl::StrCat(place, ": hash_ids is missing"));
  if (it->second.kind_case() != Value::kListValue) {
    return absl::InvalidArgumentError(
        absl::StrCat(place, ": hash_ids is ", Describe(it->second), "; it must be a list"));
  }
  const ListValue& ids = it->second.list_value();
  const int whole = static_cast<int>(request.input_rows / kPrefixBlockRows);
  const int all = static_cast<int>(request.prefix_blocks());
  if (ids.values_size() != whole && ids.values_size() != all) {
    return absl::InvalidArgumentError(absl::StrCat(place, ": hash_ids has ", ids.values_size(), " ids; input_length ",
                                                   request.input_rows, " has ", whole, " whole blocks of ",
                                                   kPrefixBlockRows, " tokens and ", all, " in all"));
  }
  request.hash_ids.reserve(ids.values_size());
  for (int i = 0; i < ids.values_size(); ++i) {
    auto id = Integer(ids.values(i), 0, kMaxHashId, absl::StrCat(place, ": hash_ids[", i, "]"));
    if (!id.ok()) return id.status();
    request.hash_ids.push_back(*id);
  }
  return request;
}

absl::StatusOr<std::vector<Request>> ReadTrace(const std::string& path, uint64_t max_requests) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  std::vector<Request> requests;
  std::string line;
  for (uint64_t number = 1; (max_requests == 0 || requests.size() < max_requests) && std::getline(file, line);
       ++number) {
    if (absl::StripSuffix(line, "\r").empty()) continue;
    const std::string place = absl::StrCat(path, ":", number);
    auto request = ParseRequest(line, place);
    if (!request.ok()) return request.status();
    if (requests.size() > kMaxRequestNumber) {
      return absl::InvalidArgumentError(absl::StrCat(place, ": more than ", kMaxRequestNumber + 1, " requests"));
    }
    if (!requests.empty() && request->timestamp_ms < requests.back().timestamp_ms) {
      return absl::InvalidArgumentError(absl::StrCat(place, ": timestamp is ", request->timestamp_ms,
                                                     "; it must not be below the line before's ",
                                                     requests.back().timestamp_ms));
    }
    request->number = static_cast<uint32_t>(requests.size());
    requests.push_back(*std::move(request));
  }
  if (file.bad()) return absl::UnavailableError(absl::StrCat(path, ": cannot be read"));
  if (requests.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no requests"));
  return requests;
}

std::string FormatRequest(const Request& request) {
  return absl::StrCat("{\"timestamp\": ", request.timestamp_ms, ", \"input_length\": ", request.input_rows,
                      ", \"output_length\": ", request.output_rows, ", \"hash_ids\": [",
                      absl::StrJoin(request.hash_ids, ", "), "]}");
}

absl::Status WriteTrace(const std::vector<Request>& requests, const std::string& path) {
  std::ofstream file(path, std::ios::trunc);
  for (const Request& request : requests) file << FormatRequest(request) << '\n';
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

}  // namespace stoker::replay
