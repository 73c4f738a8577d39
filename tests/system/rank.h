// Rank: a test's engine rank over the client library. It knows what every row must hold and checks what it is handed.
//
// Thread safety: one thread for each object.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/session.h"
#include "client/status.h"
#include "tests/system/row_tokens.h"

namespace stoker::system_test {

// Pools of the tests.
v1::PoolSpec LinearPool(const std::string& name, uint32_t layers, uint32_t row_bytes, uint32_t blocks);
v1::PoolSpec SplitPool(const std::string& name, uint32_t layers, uint32_t k_bytes, uint32_t v_bytes, uint32_t blocks);
v1::PoolSpec PagedPool(const std::string& name, uint32_t layers, uint32_t blocks);

// A session with one index group that has all layers.
v1::AttachRequest AttachTo(const v1::PoolSpec& pool, const std::string& name, uint32_t state_rows = 8,
                           uint32_t hot_rows = 64, uint32_t max_top_k = 16, uint32_t max_sequence_rows = 1024);

// Options of a session that ends when its stream does.
client::SessionOptions WithoutReattach();

// A sequence as the test sees it: token i is what row i must hold.
struct Sequence {
  uint64_t id = 0;
  uint32_t state_row = 0;
  Tokens tokens;
};

struct BatchRow {
  const Sequence* sequence = nullptr;  // none: padding
  uint32_t length = 0;
  bool commit = false;
  bool inline_newest = false;  // else the row is in the arena
  std::vector<int32_t> resident_pages = {};
};

struct StepOutcome {
  absl::Status status;
  v1::StepResponse response;
  // [group][row x top_k], from the reply or from the mailbox.
  std::vector<std::vector<int32_t>> hot_rows;

  uint64_t Sum(uint32_t (v1::LookupCounts::*count)() const) const;
};

class Rank {
 public:
  // Aborts the test's process when the daemon refuses: use Client::Attach where that is the question.
  Rank(const client::Client& client, const v1::PoolSpec& pool, const v1::AttachRequest& request,
       client::SessionOptions options = {});

  client::Session& session() { return *session_; }
  std::unique_ptr<client::Session> Release() { return std::move(session_); }
  const v1::PoolSpec& pool() const { return pool_; }
  const v1::AttachRequest& request() const { return request_; }

  // An item for `tokens`, the whole of which is the prompt.
  v1::AdmitItem Item(const Tokens& tokens, uint32_t max_rows, const std::string& key = "", bool hashes = true) const;
  v1::AdmittedSequence Admit(const v1::AdmitItem& item, const client::CallOptions& options = {});
  // Admits and stores what was not matched.
  Sequence Open(const Tokens& tokens, uint32_t max_rows, const std::string& key = "");
  absl::Status Store(const Sequence& sequence, uint32_t first, uint32_t count,
                     v1::DataSource source = v1::DATA_SOURCE_INLINE);
  absl::Status Close(const Sequence& sequence);
  // Pool rows of positions, by the sequence's block table; empty when the daemon does not give it.
  std::vector<int32_t> PoolRows(const Sequence& sequence, absl::Span<const int32_t> positions);

  // Writes the newest token's rows into the arena, as an engine's kernels do.
  void WriteNewest(const Sequence& sequence, uint32_t position, uint32_t index = 0);
  // entries[group] has rows x top_k values. With SHARED they go through the mailbox.
  v1::StepRequest StepRequestOf(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries,
                                uint32_t top_k, v1::DataSource source) const;
  StepOutcome Step(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries, uint32_t top_k,
                   v1::DataSource source = v1::DATA_SOURCE_INLINE);
  // What the hot rows hold must be the tokens at the entries' positions, in every layer of the group, as far as the
  // entries are positions of the sequence. Rows of resident pages are left out.
  void CheckRows(absl::Span<const BatchRow> batch, const std::vector<std::vector<int32_t>>& entries, uint32_t top_k,
                 const StepOutcome& outcome);
  // Rows in the arena, and rows through Read.
  std::string ArenaRow(uint32_t layer, uint32_t hot_row) const;
  absl::Status ReadStored(const Sequence& sequence, std::vector<uint32_t> positions, std::string* rows);
  // Every stored row [0, count) must be its token's.
  void CheckStored(const Sequence& sequence, uint32_t count);

 private:
  const v1::PoolSpec pool_;
  const v1::AttachRequest request_;
  std::unique_ptr<client::Session> session_;
};

}  // namespace stoker::system_test
