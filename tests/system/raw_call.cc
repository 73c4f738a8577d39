#include "tests/system/raw_call.h"

#include <grpcpp/generic/generic_stub.h>

#include <vector>

namespace stoker::system_test {

absl::Status RawBytesCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& request, std::string* response) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  PrepareContext(context, "");
  // Every operation is waited for before the next one begins.
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  bool ok = wait();
  const grpc::Slice slice(request);
  if (ok) {
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    wait();
  }
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  ok = wait();
  if (ok && response != nullptr) {
    std::vector<grpc::Slice> slices;
    if (reply.Dump(&slices).ok()) {
      for (const grpc::Slice& part : slices) {
        response->append(reinterpret_cast<const char*>(part.begin()), part.size());
      }
    }
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  queue.Shutdown();
  while (wait()) {
  }
  return client::FromGrpc(status);
}

}  // namespace stoker::system_test
