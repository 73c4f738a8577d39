#include "tests/client/fake_arena.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace stoker::client {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint64_t kDsv4PageBytes = 37440;

class LayoutBuilder {
 public:
  explicit LayoutBuilder(v1::ArenaLayout* layout) : layout_(*layout) {}

  uint64_t Reserve(uint64_t bytes) {
    const uint64_t begin = size_;
    size_ = (size_ + bytes + kAlignment - 1) / kAlignment * kAlignment;
    layout_.set_size_bytes(size_);
    return begin;
  }

  void Add(const std::string& name, const std::string& element, uint64_t offset, const std::vector<uint64_t>& shape,
           const std::vector<uint64_t>& strides) {
    v1::ArenaTensor& tensor = *layout_.add_tensors();
    tensor.set_name(name);
    tensor.set_element(element);
    tensor.set_offset_bytes(offset);
    for (const uint64_t count : shape) tensor.add_shape(count);
    for (const uint64_t stride : strides) tensor.add_stride_bytes(stride);
  }

  void AddRows(const std::string& name, uint64_t rows, uint64_t row_bytes) {
    Add(name, "u8", Reserve(rows * row_bytes), {rows, row_bytes}, {row_bytes, 1});
  }

 private:
  v1::ArenaLayout& layout_;
  uint64_t size_ = 0;
};

}  // namespace

v1::PoolSpec FakePoolSpec(const std::string& name, v1::RowLayout row_layout) {
  v1::PoolSpec spec;
  spec.set_name(name);
  spec.set_layers(4);
  spec.set_row_layout(row_layout);
  spec.set_row_bytes(row_layout == v1::ROW_LAYOUT_DSV4_PAGED ? 584 : 24);
  if (row_layout == v1::ROW_LAYOUT_SPLIT_KV) spec.set_v_row_bytes(12);
  spec.set_block_rows(64);
  spec.set_prefix_rows(64);
  spec.set_blocks(8);
  return spec;
}

v1::AttachRequest FakeAttachRequest(const std::string& pool) {
  v1::AttachRequest request;
  request.set_pool(pool);
  request.set_state_rows(2);
  request.set_hot_rows(100);
  request.set_max_top_k(7);
  request.set_max_batch_rows(5);
  request.set_max_sequence_rows(1024);
  request.set_index_space(v1::INDEX_SPACE_POSITION);
  request.set_staging_bytes(256);
  v1::IndexGroup* group = request.add_groups();
  group->add_layers(0);
  group->add_layers(1);
  request.add_groups()->add_layers(2);
  return request;
}

v1::ArenaLayout FakeArenaLayout(const v1::AttachRequest& request, const v1::PoolSpec& pool) {
  v1::ArenaLayout layout;
  LayoutBuilder builder(&layout);
  const uint64_t block_rows = pool.block_rows();
  const uint64_t newest_row = (request.hot_rows() + block_rows - 1) / block_rows * block_rows;
  layout.set_newest_row(static_cast<uint32_t>(newest_row));
  layout.set_region_rows(static_cast<uint32_t>(newest_row + block_rows));
  const uint64_t rows = uint64_t{request.state_rows()} * layout.region_rows();
  const uint64_t batch_rows = request.max_batch_rows() != 0 ? request.max_batch_rows() : request.state_rows();
  const uint64_t top_k = request.max_top_k();
  for (int i = 0; i < request.groups_size(); ++i) {
    for (const uint32_t layer : request.groups(i).layers()) {
      const std::string name = absl::StrCat("hot.", layer);
      if (pool.row_layout() == v1::ROW_LAYOUT_LINEAR) {
        builder.AddRows(name, rows, pool.row_bytes());
      } else if (pool.row_layout() == v1::ROW_LAYOUT_SPLIT_KV) {
        builder.AddRows(name + ".k", rows, pool.row_bytes());
        builder.AddRows(name + ".v", rows, pool.v_row_bytes());
      } else {
        const uint64_t pages = rows / 64;
        const uint64_t begin = builder.Reserve(pages * kDsv4PageBytes);
        builder.Add(name + ".values", "u8", begin, {pages, 64, 576}, {kDsv4PageBytes, 576, 1});
        builder.Add(name + ".scales", "u8", begin + 64 * 576, {pages, 64, 8}, {kDsv4PageBytes, 8, 1});
      }
    }
    for (const char* const name : {"indices.", "hot_rows."}) {
      builder.Add(absl::StrCat(name, i), "i32", builder.Reserve(batch_rows * top_k * 4), {batch_rows, top_k},
                  {top_k * 4, 4});
    }
    builder.Add(absl::StrCat("misses.", i), "i32", builder.Reserve(batch_rows * 4), {batch_rows}, {4});
  }
  // Doorbells in cache lines of their own.
  const uint64_t doorbells = static_cast<uint64_t>(request.groups_size()) + 1;
  for (const char* const name : {"request", "done"}) {
    builder.Add(name, "u64", builder.Reserve(doorbells * kAlignment), {doorbells}, {kAlignment});
  }
  builder.Add("ended", "i32", builder.Reserve(4), {1}, {4});
  builder.Add("batch_rows", "i32", builder.Reserve(4), {1}, {4});
  builder.Add("sequence_ids", "u64", builder.Reserve(batch_rows * 8), {batch_rows}, {8});
  for (const char* const name : {"state_rows", "lengths", "commits", "statuses"}) {
    builder.Add(name, "i32", builder.Reserve(batch_rows * 4), {batch_rows}, {4});
  }
  builder.Add("staging", "u8", builder.Reserve(request.staging_bytes()), {request.staging_bytes()}, {1});
  return layout;
}

FileDescriptor MakeMemory(uint64_t size_bytes) {
  FileDescriptor memory(memfd_create("stoker-fake-arena", MFD_CLOEXEC));
  EXPECT_TRUE(memory.valid());
  EXPECT_EQ(ftruncate(memory.get(), static_cast<off_t>(size_bytes)), 0);
  return memory;
}

FileDescriptor Duplicate(const FileDescriptor& descriptor) {
  return FileDescriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
}

DescriptorServer::DescriptorServer(std::string path, Answer answer)
    : path_(std::move(path)), answer_(std::move(answer)) {
  unlink(path_.c_str());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_LT(path_.size(), sizeof(address.sun_path));
  std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  listener_ = FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(listen(listener_.get(), 16), 0);
  int ends[2] = {-1, -1};
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  stop_read_ = FileDescriptor(ends[0]);
  stop_write_ = FileDescriptor(ends[1]);
  thread_ = std::thread([this] { Serve(); });
}

DescriptorServer::~DescriptorServer() {
  EXPECT_EQ(write(stop_write_.get(), "", 1), 1);
  thread_.join();
  unlink(path_.c_str());
}

void DescriptorServer::Serve() {
  for (;;) {
    pollfd polled[] = {{listener_.get(), POLLIN, 0}, {stop_read_.get(), POLLIN, 0}};
    if (poll(polled, 2, -1) < 0) continue;
    if (polled[1].revents != 0) return;
    const FileDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    std::string token;
    char c = 0;
    while (recv(connection.get(), &c, 1, 0) == 1 && c != '\n') token.push_back(c);
    const FileDescriptor descriptor = answer_(token);
    if (!descriptor.valid()) {
      constexpr char kRefusal[] = "\1no such token";
      send(connection.get(), kRefusal, sizeof(kRefusal) - 1, MSG_NOSIGNAL);
      continue;
    }
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int value = descriptor.get();
    std::memcpy(CMSG_DATA(header), &value, sizeof(value));
    sendmsg(connection.get(), &message, MSG_NOSIGNAL);
  }
}

}  // namespace stoker::client
