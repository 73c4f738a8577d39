#include "client/replay/rank_processes.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::replay {
namespace {

constexpr int kFailed = 3;

// Runs in the new process and ends it.
[[noreturn]] void RunRank(pid_t parent, const std::function<absl::Status()>& body, RankReport* report) {
  // A handler of the parent's means nothing here, and nobody needs a rank whose parent was killed.
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kFailed);
  const absl::Status status = body();
  if (!status.ok()) report->SetError(status);
  std::fflush(nullptr);
  // No destructors of what the parent owns: its daemon, its other children.
  _exit(status.ok() ? 0 : kFailed);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankProcesses>> RankProcesses::Start(uint32_t engines, uint32_t ranks,
                                                                    const Body& body) {
  auto processes = std::unique_ptr<RankProcesses>(new RankProcesses);
  const size_t count = size_t{engines} * ranks;
  processes->shared_bytes_ = count * sizeof(RankReport);
  void* shared = mmap(nullptr, processes->shared_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mmap of ", processes->shared_bytes_, " bytes: ", std::strerror(errno)));
  }
  processes->shared_ = shared;

  // links[engine][rank - 1]. Each process keeps its own ends and closes all others, so that one that dies is seen.
  std::vector<std::vector<RankLinkPair>> links(engines);
  for (auto& of_engine : links) {
    for (uint32_t rank = 1; rank < ranks; ++rank) {
      auto link = MakeRankLink();
      if (!link.ok()) return link.status();
      of_engine.push_back(*std::move(link));
    }
  }

  std::fflush(nullptr);
  const pid_t parent = getpid();
  for (uint32_t engine = 0; engine < engines; ++engine) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      Process process;
      process.name = absl::StrCat("engine ", engine, ranks > 1 ? absl::StrCat(", rank ", rank) : "");
      process.report =
          new (static_cast<std::byte*>(shared) + processes->processes_.size() * sizeof(RankReport)) RankReport;
      process.pid = fork();
      if (process.pid < 0) return absl::UnavailableError(absl::StrCat("fork: ", std::strerror(errno)));
      if (process.pid == 0) {
        FollowerLinks followers;
        std::optional<LeaderLink> leader;
        if (rank == 0) {
          for (RankLinkPair& link : links[engine]) followers.Add(std::move(link.leader));
        } else {
          leader.emplace(std::move(links[engine][rank - 1].follower));
        }
        links.clear();
        RunRank(
            parent, [&] { return body(engine, rank, std::move(followers), std::move(leader), process.report); },
            process.report);
      }
      processes->processes_.push_back(std::move(process));
    }
  }
  return processes;
}

bool RankProcesses::Poll() {
  bool left = false, cancelled_only = absl::IsCancelled(status_);
  for (Process& process : processes_) {
    if (process.pid < 0) continue;
    int wait_status = 0;
    if (waitpid(process.pid, &wait_status, WNOHANG) != process.pid) {
      left = true;
      continue;
    }
    process.pid = -1;
    if (WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0) continue;
    absl::Status failure =
        WIFSIGNALED(wait_status)
            ? absl::InternalError(absl::StrCat(process.name, " was ended by signal ", WTERMSIG(wait_status)))
        : process.report->peer_gone ? absl::CancelledError(absl::StrCat(process.name, ": ", process.report->error))
                                    : absl::InternalError(absl::StrCat(process.name, ": ", process.report->error));
    // A rank that gave up because another one was gone only hides the reason.
    if (status_.ok() || (cancelled_only && !absl::IsCancelled(failure))) status_ = failure;
    cancelled_only = absl::IsCancelled(status_);
  }
  if (!status_.ok() && !cancelled_only && left) Terminate();
  return left;
}

void RankProcesses::Terminate() {
  for (const Process& process : processes_) {
    if (process.pid > 0) kill(process.pid, SIGTERM);
  }
}

RankProcesses::~RankProcesses() {
  for (const Process& process : processes_) {
    if (process.pid <= 0) continue;
    kill(process.pid, SIGKILL);
    waitpid(process.pid, nullptr, 0);
  }
  if (shared_ != nullptr) munmap(shared_, shared_bytes_);
}

}  // namespace stoker::replay
