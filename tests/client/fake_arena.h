// A session arena as the daemon would make it: memory behind a descriptor, its layout, and the socket that hands it
// out.
//
// Thread safety: DescriptorServer by any thread; the rest are values and functions.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "client/arena.h"
#include "stoker/v1/pools.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::client {

// A valid pool of that layout: 4 layers, 8 blocks of 64 rows.
v1::PoolSpec FakePoolSpec(const std::string& name, v1::RowLayout row_layout);

// A valid request for it: 2 state rows of 100 hot rows, groups {0, 1} and {2}, 5 batch rows of at most 7 entries, and
// 256 bytes of staging area.
v1::AttachRequest FakeAttachRequest(const std::string& pool);

// The layout that the daemon gives for the request. SPLIT_KV planes lie behind each other, DSV4 pages are interleaved.
v1::ArenaLayout FakeArenaLayout(const v1::AttachRequest& request, const v1::PoolSpec& pool);

// Zeroed memory of that size.
FileDescriptor MakeMemory(uint64_t size_bytes);
FileDescriptor Duplicate(const FileDescriptor& descriptor);

// Listens on `path`. For each connection reads a line and gives it to `answer`, whose descriptor it sends, or, where it
// is not valid, the byte 1 and "no such token".
class DescriptorServer {
 public:
  using Answer = std::function<FileDescriptor(const std::string& token)>;

  DescriptorServer(std::string path, Answer answer);
  ~DescriptorServer();

 private:
  void Serve();

  const std::string path_;
  const Answer answer_;
  FileDescriptor listener_;
  FileDescriptor stop_read_;
  FileDescriptor stop_write_;
  std::thread thread_;
};

}  // namespace stoker::client
