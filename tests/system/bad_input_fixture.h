// A daemon with state that bad input must not change: a pool, a sequence with stored rows, and a second session.
//
// Thread safety: one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/system/daemon_fixture.h"

namespace stoker::system_test {

class BadInputTest : public DaemonTest {
 protected:
  explicit BadInputTest(std::vector<std::string> flags = {});
  // Takes it again and compares.
  void TearDown() override;

  const v1::PoolSpec& pool() const { return pool_; }
  Rank& rank() { return *rank_; }
  Rank& other_rank() { return *other_rank_; }
  // Of rank(), with the key "key": 64 rows stored of 100.
  const Sequence& sequence() const { return sequence_; }
  v1::StepRequest GoodStep() const;
  v1::StoreItem StoreItem(uint64_t id, uint32_t first, uint32_t count) const;

  // Remembers how everything is: usage of the pool, sessions, sequences, rows in the pool.
  void TakeReference() { reference_ = Describe(); }
  // The status has this code, its message has these parts, and everything is as in the reference.
  void ExpectRefused(absl::string_view what, const absl::Status& status, absl::StatusCode code,
                     const std::vector<std::string>& message);

  // A batch call with one item: the call's status, or else the item's.
  template <typename Response, typename Request>
  absl::Status Call(absl::Status (client::Session::*method)(const Request&, Response*, const client::CallOptions&),
                    const Request& request) {
    Response response;
    const absl::Status status = (rank().session().*method)(request, &response, {});
    return status.ok() ? client::FirstError(response.statuses()) : status;
  }
  // Attach without the client library's own checks; the session, if there is one, ends at once.
  absl::Status RawAttach(const v1::AttachRequest& request);

 private:
  std::string Describe();

  v1::PoolSpec pool_;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<Rank> other_rank_;
  Sequence sequence_;
  std::string reference_;
};

}  // namespace stoker::system_test
