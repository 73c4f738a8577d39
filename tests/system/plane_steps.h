// Steps of a plane, checked, whichever plane it is: what the tests of planes have in common.
//
// Thread safety: one thread for each rank.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/direct_plane.h"
#include "client/server_plane.h"
#include "tests/system/rank.h"

namespace stoker::system_test {

// Attaches with two index groups: a leader with a follower, and two layers more. The pool has 4 layers.
inline v1::AttachRequest PlaneRequest(const v1::PoolSpec& pool, const std::string& name, uint32_t state_rows = 8) {
  v1::AttachRequest request = AttachTo(pool, name, state_rows);
  request.clear_groups();
  for (uint32_t group = 0; group < 2; ++group) {
    v1::IndexGroup* layers = request.add_groups();
    layers->add_layers(2 * group);
    layers->add_layers(2 * group + 1);
  }
  return request;
}

inline absl::Status Launch(client::ServerPlane& plane, uint32_t group) { return plane.Ring(group); }
inline absl::Status Launch(client::DirectPlane& plane, uint32_t group) { return plane.Group(group); }

// One step over `batch`, of a session with the groups of PlaneRequest; the newest rows are written here. Every row that
// is handed out is checked.
template <typename Plane>
void Step(Rank& rank, Plane& plane, absl::Span<const BatchRow> batch, std::mt19937_64& random) {
  std::vector<client::PlaneRow> rows;
  std::vector<int32_t> commits;
  for (const BatchRow& row : batch) {
    commits.push_back(row.commit);
    if (row.sequence == nullptr) {
      rows.push_back({});
      continue;
    }
    const size_t first = static_cast<size_t>(
        std::find_if(batch.begin(), batch.end(), [&](const BatchRow& r) { return r.sequence == row.sequence; }) -
        batch.begin());
    rank.WriteNewest(*row.sequence, row.length - 1, row.length - batch[first].length);
    rows.push_back({row.sequence->id, row.sequence->state_row, row.length});
  }
  ASSERT_EQ(plane.Begin(rows), absl::OkStatus());
  for (uint32_t group = 0; group < 2; ++group) {
    std::vector<int32_t> entries;
    for (size_t row = 0; row < batch.size(); ++row) {
      for (int32_t& entry : plane.Entries(group, row)) {
        entry = batch[row].length == 0 ? -1 : static_cast<int32_t>(random() % batch[row].length);
        entries.push_back(entry);
      }
    }
    ASSERT_EQ(Launch(plane, group), absl::OkStatus());
    ASSERT_EQ(plane.Await(group), absl::OkStatus());
    if (group == 0) {
      ASSERT_EQ(plane.FirstRowError(), absl::OkStatus());
    }
    for (size_t row = 0; row < batch.size(); ++row) {
      for (uint32_t k = 0; k < plane.top_k(); ++k) {
        const int32_t hot_row = plane.HotRows(group, row)[k];
        if (batch[row].sequence == nullptr) {
          ASSERT_EQ(hot_row, -1);
          continue;
        }
        const size_t position = static_cast<size_t>(entries[row * plane.top_k() + k]);
        ASSERT_GE(hot_row, 0);
        for (uint32_t layer = 2 * group; layer < 2 * group + 2; ++layer) {
          ASSERT_EQ(rank.ArenaRow(layer, static_cast<uint32_t>(hot_row)),
                    RowOf(rank.pool(), layer, batch[row].sequence->tokens[position]))
              << "step " << plane.step() << " layer " << layer << " row " << row << " position " << position;
        }
      }
    }
  }
  ASSERT_EQ(plane.Commit(commits), absl::OkStatus());
  ASSERT_EQ(plane.AwaitCommit(), absl::OkStatus());
  ASSERT_EQ(plane.FirstRowError(), absl::OkStatus());
}

// Runs one step of these rows, all of which commit, and returns the statuses.
template <typename Plane>
std::vector<v1::BatchRowStatus> StatusesOf(Plane& plane, const std::vector<client::PlaneRow>& rows) {
  EXPECT_EQ(plane.Begin(rows), absl::OkStatus());
  for (uint32_t group = 0; group < 2; ++group) {
    for (size_t row = 0; row < rows.size(); ++row) {
      for (int32_t& entry : plane.Entries(group, row)) entry = 1;
    }
    EXPECT_EQ(Launch(plane, group), absl::OkStatus());
    EXPECT_EQ(plane.Await(group), absl::OkStatus());
  }
  EXPECT_EQ(plane.Commit(std::vector<int32_t>(rows.size(), 1)), absl::OkStatus());
  EXPECT_EQ(plane.AwaitCommit(), absl::OkStatus());
  return {plane.statuses().begin(), plane.statuses().end()};
}

// A sequence whose first `prompt` tokens are stored, and that goes on to `rows`.
inline Sequence OpenPart(Rank& rank, uint64_t seed, uint32_t prompt, uint32_t rows, const std::string& key = "") {
  Sequence all{0, 0, MakeTokens(seed, rows)};
  const Sequence opened = rank.Open(Tokens(all.tokens.begin(), all.tokens.begin() + prompt), rows, key);
  all.id = opened.id;
  all.state_row = opened.state_row;
  return all;
}

// The engine's words, as a broken engine may write them.
class Words {
 public:
  explicit Words(Rank& rank) : info_(rank.session().info()), arena_(rank.session().arena()) {}

  template <typename T>
  void Put(const std::string& name, size_t index, T value) {
    std::atomic_ref<T>(*At<T>(name, index)).store(value, std::memory_order_release);
  }
  template <typename T>
  T Get(const std::string& name, size_t index) {
    return std::atomic_ref<T>(*At<T>(name, index)).load(std::memory_order_acquire);
  }

 private:
  template <typename T>
  T* At(const std::string& name, size_t index) {
    for (const v1::ArenaTensor& tensor : info_.arena().tensors()) {
      if (tensor.name() != name) continue;
      return reinterpret_cast<T*>(arena_->bytes().data() + tensor.offset_bytes() + index * tensor.stride_bytes(0));
    }
    ADD_FAILURE() << name;
    std::abort();
  }

  const v1::Attached info_;
  const std::shared_ptr<const client::Arena> arena_;
};

}  // namespace stoker::system_test
