// Requests and replies of one RPC, used again call after call: a step's arrays keep their memory, and gRPC neither
// grows them anew, chunk by chunk, nor gives them back. tests/bench/README.md has what steps gained.
//
// Thread safety: any thread. Must outlive the server.
//
// Invariants: at most kMaxKept pairs of messages are kept, none of them larger than kMaxKeptBytes.
#pragma once

#include <grpcpp/support/message_allocator.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace stoker::rpc {

template <typename Request, typename Response>
class MessagePool final : public grpc::MessageAllocator<Request, Response> {
 public:
  grpc::MessageHolder<Request, Response>* AllocateMessages() override {
    const std::lock_guard lock(mutex_);
    if (kept_.empty()) return new Holder(this);
    Holder* const holder = kept_.back().release();
    kept_.pop_back();
    return holder;
  }

 private:
  static constexpr size_t kMaxKept = 8;
  static constexpr size_t kMaxKeptBytes = size_t{2} << 20;

  class Holder final : public grpc::MessageHolder<Request, Response> {
   public:
    explicit Holder(MessagePool* pool) : pool_(pool) {
      this->set_request(&request_);
      this->set_response(&response_);
    }
    void Release() override { pool_->Keep(std::unique_ptr<Holder>(this)); }
    size_t bytes() const { return request_.SpaceUsedLong() + response_.SpaceUsedLong(); }
    void Clear() {
      request_.Clear();
      response_.Clear();
    }

   private:
    MessagePool* const pool_;
    Request request_;
    Response response_;
  };

  void Keep(std::unique_ptr<Holder> holder) {
    if (holder->bytes() > kMaxKeptBytes) return;
    holder->Clear();
    const std::lock_guard lock(mutex_);
    if (kept_.size() < kMaxKept) kept_.push_back(std::move(holder));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Holder>> kept_;  // guarded by mutex_
};

}  // namespace stoker::rpc
