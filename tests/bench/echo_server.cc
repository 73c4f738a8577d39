#include "tests/bench/echo_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/bench/echo.grpc.pb.h"

namespace stoker::bench {
namespace {

constexpr int kMaxMessageBytes = 64 << 20;

void Answer(const EchoRequest& request, EchoResponse* response) {
  const size_t bytes = request.reply_bytes();
  std::string* payload = response->mutable_payload();
  payload->assign(request.payload(), 0, bytes);
  payload->resize(bytes);
}

class SyncEcho final : public Echo::Service {
  grpc::Status Unary(grpc::ServerContext*, const EchoRequest* request, EchoResponse* response) override {
    Answer(*request, response);
    return grpc::Status::OK;
  }

  grpc::Status Stream(grpc::ServerContext*, grpc::ServerReaderWriter<EchoResponse, EchoRequest>* stream) override {
    EchoRequest request;
    EchoResponse response;
    while (stream->Read(&request)) {
      Answer(request, &response);
      if (!stream->Write(response)) break;
    }
    return grpc::Status::OK;
  }
};

class CallbackEcho final : public Echo::CallbackService {
  class EchoStream final : public grpc::ServerBidiReactor<EchoRequest, EchoResponse> {
   public:
    EchoStream() { StartRead(&request_); }
    void OnReadDone(bool ok) override {
      if (!ok) {
        Finish(grpc::Status::OK);
        return;
      }
      Answer(request_, &response_);
      StartWrite(&response_);
    }
    void OnWriteDone(bool ok) override {
      if (ok) {
        StartRead(&request_);
      } else {
        Finish(grpc::Status::CANCELLED);
      }
    }
    void OnDone() override { delete this; }

   private:
    EchoRequest request_;
    EchoResponse response_;
  };

  grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, const EchoRequest* request,
                                  EchoResponse* response) override {
    Answer(*request, response);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerBidiReactor<EchoRequest, EchoResponse>* Stream(grpc::CallbackServerContext*) override {
    return new EchoStream();
  }
};

// One call of the completion-queue server: owns itself.
class QueuedCall {
 public:
  virtual ~QueuedCall() = default;
  // The operation that was begun last is done.
  virtual void Proceed(bool ok) = 0;
};

class QueuedUnary final : public QueuedCall {
 public:
  QueuedUnary(Echo::AsyncService* service, grpc::ServerCompletionQueue* queue)
      : service_(service), queue_(queue), writer_(&context_) {
    service_->RequestUnary(&context_, &request_, &writer_, queue_, queue_, this);
  }

  void Proceed(bool ok) override {
    if (!ok || answered_) {
      delete this;
      return;
    }
    new QueuedUnary(service_, queue_);
    Answer(request_, &response_);
    answered_ = true;
    writer_.Finish(response_, grpc::Status::OK, this);
  }

 private:
  Echo::AsyncService* const service_;
  grpc::ServerCompletionQueue* const queue_;
  grpc::ServerContext context_;
  EchoRequest request_;
  EchoResponse response_;
  grpc::ServerAsyncResponseWriter<EchoResponse> writer_;
  bool answered_ = false;
};

class QueuedStream final : public QueuedCall {
 public:
  QueuedStream(Echo::AsyncService* service, grpc::ServerCompletionQueue* queue)
      : service_(service), queue_(queue), stream_(&context_) {
    service_->RequestStream(&context_, &stream_, queue_, queue_, this);
  }

  void Proceed(bool ok) override {
    switch (state_) {
      case State::kRequested:
        if (!ok) {
          delete this;
          return;
        }
        new QueuedStream(service_, queue_);
        Read();
        return;
      case State::kReading:
        if (!ok) {
          state_ = State::kFinishing;
          stream_.Finish(grpc::Status::OK, this);
          return;
        }
        Answer(request_, &response_);
        state_ = State::kWriting;
        stream_.Write(response_, this);
        return;
      case State::kWriting:
        Read();  // fails where the write has failed
        return;
      case State::kFinishing:
        delete this;
        return;
    }
  }

 private:
  enum class State { kRequested, kReading, kWriting, kFinishing };

  void Read() {
    state_ = State::kReading;
    stream_.Read(&request_, this);
  }

  Echo::AsyncService* const service_;
  grpc::ServerCompletionQueue* const queue_;
  grpc::ServerContext context_;
  EchoRequest request_;
  EchoResponse response_;
  grpc::ServerAsyncReaderWriter<EchoResponse, EchoRequest> stream_;
  State state_ = State::kRequested;
};

void RunQueue(grpc::ServerCompletionQueue* queue) {
  void* tag;
  bool ok;
  while (queue->Next(&tag, &ok)) static_cast<QueuedCall*>(tag)->Proceed(ok);
}

}  // namespace

absl::Status ServeEcho(absl::string_view api, bool standard, const std::string& socket_path) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  grpc::EnableDefaultHealthCheckService(standard);
  if (standard) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddListeningPort(absl::StrCat("unix:", socket_path), grpc::InsecureServerCredentials());
  SyncEcho sync;
  CallbackEcho callback;
  Echo::AsyncService queued;
  std::unique_ptr<grpc::ServerCompletionQueue> queue;
  if (api == "sync") {
    builder.RegisterService(&sync);
  } else if (api == "callback") {
    builder.RegisterService(&callback);
  } else if (api == "cq") {
    builder.RegisterService(&queued);
    queue = builder.AddCompletionQueue();
  } else {
    return absl::InvalidArgumentError(absl::StrCat("echo_server: ", api, " given, allowed are sync, callback and cq"));
  }
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::UnavailableError(absl::StrCat("cannot listen on ", socket_path));
  std::thread poller;
  if (queue != nullptr) {
    new QueuedUnary(&queued, queue.get());
    new QueuedStream(&queued, queue.get());
    // One thread: a second one on the same queue only adds wake-ups where one client waits for each reply.
    poller = std::thread(RunQueue, queue.get());
  }
  int signal = 0;
  sigwait(&signals, &signal);
  server->Shutdown(std::chrono::system_clock::now());
  if (queue != nullptr) {
    queue->Shutdown();
    poller.join();
  }
  return absl::OkStatus();
}

}  // namespace stoker::bench
