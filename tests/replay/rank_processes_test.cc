#include "client/replay/rank_processes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace stoker::replay {
namespace {

using ::testing::HasSubstr;

absl::Status RunAll(uint32_t engines, uint32_t ranks, const RankProcesses::Body& body, uint64_t* requests = nullptr) {
  auto processes = RankProcesses::Start(engines, ranks, body);
  if (!processes.ok()) return processes.status();
  EXPECT_EQ((*processes)->size(), engines * ranks);
  while ((*processes)->Poll()) absl::SleepFor(absl::Milliseconds(1));
  if (requests != nullptr) {
    for (size_t i = 0; i < (*processes)->size(); ++i) *requests += (*processes)->report(i).requests.get();
  }
  return (*processes)->status();
}

// Waits until a signal ends the process.
absl::Status Forever() {
  for (;;) pause();
}

TEST(RankProcessesTest, RanksOfAnEngineTalkToEachOtherAndReport) {
  const auto body = [](uint32_t engine, uint32_t rank, FollowerLinks followers, std::optional<LeaderLink> leader,
                       RankReport* report) -> absl::Status {
    if (leader.has_value() != (rank > 0)) return absl::InternalError("a rank has the wrong links");
    if (rank == 0) {
      for (uint32_t i = 0; i < 5; ++i) {
        if (absl::Status s = followers.Send({RankCommand::kAdmit, 100 * engine + i}); !s.ok()) return s;
        if (absl::Status s = followers.AwaitAcknowledgements(); !s.ok()) return s;
      }
      report->requests.Add(1);
      return followers.Send({RankCommand::kEnd, 0});
    }
    for (uint32_t i = 0;; ++i) {
      const auto message = leader->Receive();
      if (!message.ok()) return message.status();
      if (message->command == RankCommand::kEnd) return absl::OkStatus();
      if (message->request != 100 * engine + i) return absl::InternalError("out of order");
      report->requests.Add(10);
      if (absl::Status s = leader->Acknowledge(); !s.ok()) return s;
    }
  };
  uint64_t requests = 0;
  const absl::Status status = RunAll(3, 3, body, &requests);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(requests, 3u * (1 + 2 * 5 * 10));
}

TEST(RankProcessesTest, TheFirstFailureEndsTheOthersAndIsTold) {
  const absl::Status status =
      RunAll(3, 1, [](uint32_t engine, uint32_t, FollowerLinks, std::optional<LeaderLink>, RankReport*) {
        return engine == 1 ? absl::NotFoundError("no such pool") : Forever();
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "engine 1: NOT_FOUND: no such pool");
}

TEST(RankProcessesTest, ARankThatDiesIsTheReasonAndNotTheOnesThatMissIt) {
  for (const uint32_t dying : {0u, 1u, 2u}) {
    const absl::Status status =
        RunAll(1, 3,
               [&](uint32_t, uint32_t rank, FollowerLinks followers, std::optional<LeaderLink> leader,
                   RankReport*) -> absl::Status {
                 if (rank == dying) raise(SIGKILL);
                 return leader.has_value() ? leader->Receive().status() : followers.AwaitAcknowledgements();
               });
    EXPECT_EQ(status.message(), absl::StrCat("engine 0, rank ", dying, " was ended by signal 9"));
  }
}

TEST(RankProcessesTest, NothingIsLeftBehind) {
  pid_t ranks[2] = {};
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  {
    auto processes = RankProcesses::Start(
        2, 1, [&](uint32_t, uint32_t, FollowerLinks, std::optional<LeaderLink>, RankReport*) -> absl::Status {
          const pid_t self = getpid();
          if (write(pipe_ends[1], &self, sizeof(self)) != sizeof(self)) return absl::InternalError("write");
          return Forever();
        });
    ASSERT_TRUE(processes.ok());
    for (pid_t& rank : ranks) ASSERT_EQ(read(pipe_ends[0], &rank, sizeof(rank)), static_cast<ssize_t>(sizeof(rank)));
    EXPECT_TRUE((*processes)->Poll());
  }
  for (const pid_t rank : ranks) {
    EXPECT_EQ(kill(rank, 0), -1);
    EXPECT_EQ(errno, ESRCH);
  }
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(RankProcessesTest, Terminate) {
  auto processes = RankProcesses::Start(
      2, 1, [](uint32_t, uint32_t, FollowerLinks, std::optional<LeaderLink>, RankReport*) { return Forever(); });
  ASSERT_TRUE(processes.ok());
  (*processes)->Terminate();
  while ((*processes)->Poll()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_THAT(std::string((*processes)->status().message()), HasSubstr("was ended by signal 15"));
}

}  // namespace
}  // namespace stoker::replay
