#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/rpc/services.h"
#include "stoker/v1/sequences.grpc.pb.h"

namespace stoker::rpc {
namespace {

void ToProto(const std::vector<core::AdmittedSequence>& sequences,
             google::protobuf::RepeatedPtrField<v1::AdmittedSequence>* protos) {
  for (const core::AdmittedSequence& sequence : sequences) {
    v1::AdmittedSequence* proto = protos->Add();
    rpc::ToProto(sequence.status, proto->mutable_status());
    if (!sequence.status.ok()) continue;
    proto->set_sequence_id(sequence.id.value);
    proto->set_state_row(static_cast<uint32_t>(sequence.state_row));
    proto->set_matched_rows(static_cast<uint32_t>(sequence.matched_rows));
    proto->set_stored_rows(static_cast<uint32_t>(sequence.stored_rows));
    proto->set_writer(sequence.writer);
  }
}

// An Admit may wait for a prefix; when the client goes away it must not.
class AdmitUnaryCall final : public UnaryCall {
 public:
  explicit AdmitUnaryCall(const ServiceContext& service) : UnaryCall(service, "Sequences/Admit") {}

  // `running` may be null: nothing was begun.
  void SetRunning(std::shared_ptr<core::Session::AdmitCall> running) {
    bool cancelled;
    {
      absl::MutexLock lock(&mutex_);
      running_ = running;
      cancelled = cancelled_;
    }
    if (cancelled && running != nullptr) running->Cancel();
  }

  void OnCancel() override {
    std::shared_ptr<core::Session::AdmitCall> running;
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      running = running_;
    }
    if (running != nullptr) running->Cancel();
  }

 private:
  absl::Mutex mutex_;
  std::shared_ptr<core::Session::AdmitCall> running_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

class SequencesService final : public v1::Sequences::CallbackService {
 public:
  explicit SequencesService(const ServiceContext& service) : service_(service) {}

  grpc::ServerUnaryReactor* Admit(grpc::CallbackServerContext* context, const v1::AdmitRequest* request,
                                  v1::AdmitResponse* response) override {
    auto* call = new AdmitUnaryCall(service_);
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    std::vector<core::AdmitItem> items = Map<core::AdmitItem>(request->items(), [](const v1::AdmitItem& item) {
      core::AdmitItem admit;
      admit.key = item.sequence_key();
      admit.prompt_rows = item.prompt_rows();
      admit.max_rows = item.max_rows();
      admit.block_hashes = item.block_hashes();
      admit.wait_for_prefix = item.wait_for_prefix();
      return admit;
    });
    // The reply may come, and end the call, before Admit returns: hold it until the running admission is known.
    auto gate = std::make_shared<ReplyGate>(call);
    call->SetRunning((*session)->Admit(std::move(items),
                                       [gate, response](absl::StatusOr<std::vector<core::AdmittedSequence>> sequences) {
                                         if (sequences.ok()) ToProto(*sequences, response->mutable_sequences());
                                         gate->Pass(sequences.status());
                                       }));
    gate->Open();
    return call;
  }

  grpc::ServerUnaryReactor* Extend(grpc::CallbackServerContext* context, const v1::ExtendRequest* request,
                                   v1::ExtendResponse* response) override {
    auto* call = new UnaryCall(service_, "Sequences/Extend");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    (*session)->Extend(
        Map<core::ExtendItem>(request->items(),
                              [](const v1::ExtendItem& item) {
                                return core::ExtendItem{core::SequenceId{item.sequence_id()}, item.max_rows()};
                              }),
        [call, response](absl::StatusOr<core::BatchResult> result) {
          if (result.ok()) {
            for (const absl::Status& s : result->statuses) rpc::ToProto(s, response->add_statuses());
          }
          call->Reply(result.status());
        });
    return call;
  }

  grpc::ServerUnaryReactor* Fork(grpc::CallbackServerContext* context, const v1::ForkRequest* request,
                                 v1::ForkResponse* response) override {
    auto* call = new UnaryCall(service_, "Sequences/Fork");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    (*session)->Fork(Map<core::ForkItem>(request->items(),
                                         [](const v1::ForkItem& item) {
                                           return core::ForkItem{core::SequenceId{item.sequence_id()}, item.rows(),
                                                                 item.max_rows(), item.sequence_key()};
                                         }),
                     [call, response](absl::StatusOr<std::vector<core::AdmittedSequence>> sequences) {
                       if (sequences.ok()) ToProto(*sequences, response->mutable_sequences());
                       call->Reply(sequences.status());
                     });
    return call;
  }

  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context, const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override {
    auto* call = new UnaryCall(service_, "Sequences/Release");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    (*session)->Release(
        Map<core::SequenceId>(request->sequence_ids(), [](uint64_t id) { return core::SequenceId{id}; }),
        [call, response](absl::StatusOr<core::BatchResult> result) {
          if (result.ok()) {
            for (const absl::Status& s : result->statuses) rpc::ToProto(s, response->add_statuses());
          }
          call->Reply(result.status());
        });
    return call;
  }

  grpc::ServerUnaryReactor* GetBlockTables(grpc::CallbackServerContext* context,
                                           const v1::GetBlockTablesRequest* request,
                                           v1::GetBlockTablesResponse* response) override {
    auto* call = new UnaryCall(service_, "Sequences/GetBlockTables");
    response->set_boot_epoch(service_.registry->epoch());
    const absl::StatusOr<std::shared_ptr<core::Session>> session = Authenticate(service_, *context);
    if (!session.ok()) {
      call->Reply(session.status());
      return call;
    }
    const auto tables = (*session)->BlockTables(
        Map<core::SequenceId>(request->sequence_ids(), [](uint64_t id) { return core::SequenceId{id}; }));
    if (tables.ok()) {
      for (const absl::StatusOr<core::Pool::BlockTable>& table : *tables) {
        v1::BlockTable* proto = response->add_tables();
        rpc::ToProto(table.status(), proto->mutable_status());
        if (!table.ok()) continue;
        proto->mutable_blocks()->Add(table->blocks.begin(), table->blocks.end());
        proto->set_readable_rows(static_cast<uint32_t>(table->readable_rows));
      }
    }
    call->Reply(tables.status());
    return call;
  }

 private:
  // Lets a reply through when it has come and the gate is open, whichever is later.
  class ReplyGate {
   public:
    explicit ReplyGate(UnaryCall* call) : call_(call) {}
    void Pass(absl::Status status) {
      status_ = std::move(status);
      Arrive();
    }
    void Open() { Arrive(); }

   private:
    void Arrive() {
      if (arrived_.fetch_add(1) == 1) call_->Reply(status_);
    }
    UnaryCall* const call_;
    absl::Status status_;
    std::atomic<int> arrived_{0};
  };

  const ServiceContext& service_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeSequences(const ServiceContext& service) {
  return std::make_unique<SequencesService>(service);
}

}  // namespace stoker::rpc
