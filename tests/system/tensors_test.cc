// Tensors of the engine: rows between them and the pool in every geometry, all that must be refused, and that nothing
// stays mapped.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/descriptor_exchange.h"
#include "client/tensor_memory.h"
#include "stoker/v1/sessions.grpc.pb.h"
#include "tests/system/bad_input_fixture.h"
#include "tests/system/host_tensor.h"
#include "tests/system/raw_call.h"

namespace stoker::system_test {
namespace {

using ::testing::HasSubstr;
using Geometry = v1::RegisterTensorRequest;

constexpr uint32_t kRows = 96;  // of a tensor
constexpr uint32_t kSequenceRows = 70;
constexpr auto kInvalidArgument = absl::StatusCode::kInvalidArgument;
constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kResourceExhausted = absl::StatusCode::kResourceExhausted;

// Mappings of tensors in a process.
int TensorMappings(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/maps"));
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find("stoker-tensor") != std::string::npos ? 1 : 0;
  return count;
}
// Descriptors of tensors that a process has open.
int TensorDescriptors(pid_t pid) {
  int count = 0;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    char target[64] = {};
    const std::string link = absl::StrCat("/proc/", pid, "/fd/", descriptor);
    if (readlink(link.c_str(), target, sizeof target - 1) < 0) continue;
    count += std::string(target).find("stoker-tensor") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Rows of a page lie together, with `gap` bytes behind them; a layer's pages behind one another.
Geometry PagedTensor(const v1::PoolSpec& pool, uint32_t page_rows, uint32_t gap) {
  Geometry geometry;
  geometry.set_rows(kRows);
  geometry.set_page_rows(page_rows);
  uint64_t page_bytes = 0;
  for (uint32_t p = 0; p < PartCountOf(pool); ++p) {
    v1::TensorPart* part = geometry.add_parts();
    part->set_part(p);
    part->set_offset_bytes(page_bytes);
    part->set_row_stride_bytes(PartBytesOf(pool, p));
    page_bytes += uint64_t{page_rows} * PartBytesOf(pool, p);
  }
  page_bytes += gap;
  for (v1::TensorPart& part : *geometry.mutable_parts()) part.set_page_stride_bytes(page_bytes);
  const uint64_t pages = (kRows + page_rows - 1) / page_rows;
  geometry.set_layer_stride_bytes(pages * page_bytes);
  geometry.set_size_bytes(pool.layers() * pages * page_bytes);
  geometry.set_offset_bytes(5 * 4096 + 36);
  return geometry;
}

// [row][layer][part]: the layers' rows lie between one another's.
Geometry InterleavedTensor(const v1::PoolSpec& pool) {
  Geometry geometry;
  geometry.set_rows(kRows);
  const uint32_t row_bytes = RowBytes(pool);
  uint64_t offset = 0;
  for (uint32_t p = 0; p < PartCountOf(pool); ++p) {
    v1::TensorPart* part = geometry.add_parts();
    part->set_part(p);
    part->set_offset_bytes(offset);
    part->set_row_stride_bytes(uint64_t{row_bytes} * pool.layers());
    offset += PartBytesOf(pool, p);
  }
  geometry.set_layer_stride_bytes(row_bytes);
  geometry.set_size_bytes(uint64_t{kRows} * row_bytes * pool.layers());
  return geometry;
}

// The ways in which an engine may have all layers and parts.
std::vector<std::vector<Geometry>> Geometries(const v1::PoolSpec& pool) {
  std::vector<std::vector<Geometry>> all = {{DenseTensor(pool, kRows)},
                                            {PagedTensor(pool, 16, 0)},
                                            {PagedTensor(pool, 64, 96)},
                                            {PagedTensor(pool, 7, 4)},
                                            {InterleavedTensor(pool)}};
  std::vector<Geometry> of_a_layer, of_a_part, of_both;
  for (uint32_t layer = 0; layer < pool.layers(); ++layer) {
    of_a_layer.push_back(DenseTensor(pool, kRows + layer, {layer}));
    for (uint32_t part = 0; part < PartCountOf(pool); ++part)
      of_both.push_back(DenseTensor(pool, kRows, {layer}, {part}));
  }
  std::vector<uint32_t> backwards(pool.layers());
  std::iota(backwards.rbegin(), backwards.rend(), 0u);
  for (uint32_t part = 0; part < PartCountOf(pool); ++part)
    of_a_part.push_back(DenseTensor(pool, kRows, backwards, {part}));
  all.push_back(of_a_layer);
  all.push_back(of_a_part);
  all.push_back(of_both);
  return all;
}

class TensorsTest : public DaemonTest {
 protected:
  explicit TensorsTest(std::vector<std::string> flags = {}) : DaemonTest(std::move(flags)) {}

  // Tensors of one of the geometries, registered.
  std::vector<std::unique_ptr<HostTensor>> Register(Rank& rank, const std::vector<Geometry>& geometries) {
    std::vector<std::unique_ptr<HostTensor>> tensors;
    for (const Geometry& geometry : geometries) {
      tensors.push_back(std::make_unique<HostTensor>(rank.pool(), geometry));
      const absl::Status status = tensors.back()->Register(rank.session());
      EXPECT_TRUE(status.ok()) << status << "\n" << geometry.DebugString();
    }
    return tensors;
  }

  static absl::Status Unregister(Rank& rank, uint64_t id) {
    v1::UnregisterTensorRequest request;
    request.set_tensor_id(id);
    v1::UnregisterTensorResponse response;
    return rank.session().UnregisterTensor(request, &response);
  }

  static v1::StoreItem StoreItemOf(const Sequence& sequence, uint32_t first, uint32_t count,
                                   const std::vector<std::unique_ptr<HostTensor>>& tensors,
                                   const std::vector<uint32_t>& rows) {
    v1::StoreItem item;
    item.mutable_range()->set_sequence_id(sequence.id);
    item.mutable_range()->set_first_row(first);
    item.mutable_range()->set_row_count(count);
    item.set_source(v1::DATA_SOURCE_TENSOR);
    for (const auto& tensor : tensors) item.mutable_tensor()->add_tensor_ids(tensor->id());
    item.mutable_tensor()->mutable_rows()->Add(rows.begin(), rows.end());
    return item;
  }

  static absl::Status Store(Rank& rank, const v1::StoreItem& item, uint64_t* stored_bytes = nullptr) {
    v1::StoreRequest request;
    *request.add_items() = item;
    v1::StoreResponse response;
    const absl::Status status = rank.session().Store(request, &response);
    if (stored_bytes != nullptr) *stored_bytes = response.stored_bytes();
    return status.ok() ? client::FirstError(response.statuses()) : status;
  }

  static absl::Status Load(Rank& rank, const v1::StoreItem& like, uint64_t* loaded_bytes = nullptr) {
    v1::LoadRequest request;
    v1::LoadItem* item = request.add_items();
    *item->mutable_range() = like.range();
    item->set_target(v1::LOAD_TARGET_TENSOR);
    *item->mutable_tensor() = like.tensor();
    v1::LoadResponse response;
    const absl::Status status = rank.session().Load(request, &response);
    if (loaded_bytes != nullptr) *loaded_bytes = response.loaded_bytes();
    return status.ok() ? client::FirstError(response.statuses()) : status;
  }

  // The gauge of a session.
  double Mapped(const std::string& session) {
    return Scrape(daemon().metrics_port())[absl::StrCat("stoker_client_mapped_bytes{session=\"", session, "\"}")];
  }
  int Mappings() { return TensorMappings(daemon().process().pid()); }
  int Descriptors() { return TensorDescriptors(daemon().process().pid()); }
};

// Every geometry, both ways: what one engine stores, another one loads into tensors of another shape.
TEST_F(TensorsTest, MovesRowsBetweenEveryGeometryAndEveryRowLayout) {
  std::mt19937 random(7);
  for (const v1::PoolSpec& spec : {LinearPool("linear", 3, 656, 64), LinearPool("narrow", 2, 20, 64),
                                   SplitPool("split", 3, 48, 32, 64), PagedPool("paged", 2, 16)}) {
    const v1::PoolSpec pool = CreatePool(spec);
    Rank rank(client(), pool, AttachTo(pool, pool.name()));
    const std::vector<std::vector<Geometry>> geometries = Geometries(pool);
    for (size_t g = 0; g < geometries.size(); ++g) {
      SCOPED_TRACE(absl::StrCat(pool.name(), " geometry ", g));
      const auto source = Register(rank, geometries[g]);
      const auto target = Register(rank, geometries[(g + 1) % geometries.size()]);
      // Any rows of the tensor, in any order, in two pieces.
      std::vector<uint32_t> rows(kRows);
      std::iota(rows.begin(), rows.end(), 0u);
      std::shuffle(rows.begin(), rows.end(), random);
      rows.resize(kSequenceRows);
      Sequence sequence{0, 0, MakeTokens(g + 1, kSequenceRows)};
      v1::AdmitItem admit = rank.Item(sequence.tokens, kSequenceRows, "", /*hashes=*/false);
      sequence.id = rank.Admit(admit).sequence_id();
      for (const auto& tensor : source) {
        for (uint32_t i = 0; i < kSequenceRows; ++i) tensor->Put(rows[i], sequence.tokens[i]);
      }
      constexpr uint32_t kFirst = 23;
      uint64_t bytes = 0;
      absl::Status status =
          Store(rank, StoreItemOf(sequence, 0, kFirst, source, {rows.begin(), rows.begin() + kFirst}), &bytes);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(bytes, uint64_t{kFirst} * pool.layers() * RowBytes(pool));
      status = Store(
          rank, StoreItemOf(sequence, kFirst, kSequenceRows - kFirst, source, {rows.begin() + kFirst, rows.end()}));
      ASSERT_TRUE(status.ok()) << status;
      rank.CheckStored(sequence, kSequenceRows);
      // Back, to rows that follow one another.
      v1::StoreItem back = StoreItemOf(sequence, 5, kSequenceRows - 5, target, {});
      back.mutable_tensor()->set_first_row(kRows - (kSequenceRows - 5));
      status = Load(rank, back, &bytes);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(bytes, uint64_t{kSequenceRows - 5} * pool.layers() * RowBytes(pool));
      for (const auto& tensor : target) {
        for (uint32_t i = 5; i < kSequenceRows; ++i) {
          ASSERT_TRUE(tensor->Holds(kRows - kSequenceRows + i, sequence.tokens[i])) << "row " << i;
        }
        // Nothing else was touched.
        for (uint32_t i = 5; i < kSequenceRows; ++i) tensor->Put(kRows - kSequenceRows + i, 0);
        size_t row_bytes = 0;
        for (const v1::TensorPart& part : tensor->geometry().parts()) row_bytes += PartBytesOf(pool, part.part());
        const size_t layers = tensor->geometry().layers_size() == 0
                                  ? pool.layers()
                                  : static_cast<size_t>(tensor->geometry().layers_size());
        EXPECT_LE(tensor->ChangedBytes(), layers * row_bytes * (kSequenceRows - 5));
      }
      EXPECT_TRUE(rank.Close(sequence).ok());
      for (const auto* tensors : {&source, &target}) {
        for (const auto& tensor : *tensors) EXPECT_TRUE(Unregister(rank, tensor->id()).ok());
      }
    }
    EXPECT_EQ(Mappings(), 0);
  }
}

TEST_F(TensorsTest, StoresRowsThatStepsThenFind) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 2, 64, 64));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  const auto tensors = Register(rank, {DenseTensor(pool, kRows)});
  Sequence sequence{0, 0, MakeTokens(3, kSequenceRows)};
  const v1::AdmittedSequence admitted = rank.Admit(rank.Item(sequence.tokens, kSequenceRows));
  sequence.id = admitted.sequence_id();
  sequence.state_row = admitted.state_row();
  for (uint32_t i = 0; i < kSequenceRows; ++i) tensors[0]->Put(i, sequence.tokens[i]);
  ASSERT_TRUE(Store(rank, StoreItemOf(sequence, 0, kSequenceRows, tensors, {})).ok());
  // In one call with rows of messages.
  v1::StoreRequest request;
  *request.add_items() = StoreItemOf(sequence, 10, 5, tensors, {10, 11, 12, 13, 14});
  v1::StoreItem* item = request.add_items();
  item->mutable_range()->set_sequence_id(sequence.id);
  item->mutable_range()->set_first_row(20);
  item->mutable_range()->set_row_count(1);
  item->set_source(v1::DATA_SOURCE_INLINE);
  item->set_rows(RowsOf(pool, absl::MakeConstSpan(sequence.tokens).subspan(20, 1)));
  v1::StoreResponse response;
  ASSERT_TRUE(rank.session().Store(request, &response).ok());
  EXPECT_TRUE(client::FirstError(response.statuses()).ok());
  const std::vector<BatchRow> batch = {{&sequence, kSequenceRows, false, true}};
  const std::vector<std::vector<int32_t>> entries = {{5, 50, 69, 3}};
  rank.CheckRows(batch, entries, 4, rank.Step(batch, entries, 4));
}

// The gauge, the mappings and the descriptors.
TEST_F(TensorsTest, CountsWhatIsMapped) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 2, 64, 64));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  const double before = Mapped("rank");
  EXPECT_EQ(before, static_cast<double>(rank.session().info().arena().size_bytes()));
  Geometry geometry = DenseTensor(pool, kRows);
  geometry.set_offset_bytes(4096 * 3 + 8);
  std::vector<uint64_t> ids;
  {
    // Several tensors of one piece of memory, which may then be closed here.
    HostTensor memory(pool, geometry);
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(memory.Register(rank.session()).ok());
      EXPECT_TRUE(std::find(ids.begin(), ids.end(), memory.id()) == ids.end());
      ids.push_back(memory.id());
      EXPECT_EQ(Mapped("rank"), before + static_cast<double>(ids.size() * geometry.size_bytes()));
      EXPECT_EQ(Mappings(), static_cast<int>(ids.size()));
    }
  }
  EXPECT_EQ(Descriptors(), 0);
  for (const uint64_t id : ids) {
    EXPECT_TRUE(Unregister(rank, id).ok());
    EXPECT_EQ(Unregister(rank, id).code(), kFailedPrecondition);
  }
  EXPECT_EQ(Mapped("rank"), before);
  EXPECT_EQ(Mappings(), 0);
  // With the session what it has left goes.
  HostTensor left(pool, geometry);
  ASSERT_TRUE(left.Register(rank.session()).ok());
  rank.Release().reset();
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] { return Mappings() == 0; }));
}

TEST_F(TensorsTest, UnmapsTheTensorsOfAKilledEngine) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 2, 64, 64));
  Rank bystander(client(), pool, AttachTo(pool, "bystander"));
  const auto tensors = Register(bystander, {DenseTensor(pool, kRows)});
  const double before = Mapped("bystander");
  for (int round = 0; round < 3; ++round) {
    ChildProcess engine({ClientProcessPath(), daemon().address(), "p", "victim", "tensor"},
                        daemon().folder().File(absl::StrCat("victim", round)));
    ASSERT_TRUE(engine.AwaitOutput("ready", absl::Seconds(30))) << engine.Output();
    // Its tensors, one of them twice, and a descriptor that it has handed over and not registered.
    EXPECT_GT(Mapped("victim"), Mapped("bystander"));
    EXPECT_EQ(Mappings(), 1 + 3);
    EXPECT_EQ(Descriptors(), 1);
    engine.Kill();
    EXPECT_TRUE(
        Eventually(absl::Seconds(2), [&] { return Mappings() == 1 && Descriptors() == 0 && SessionCount() == 1; }));
    EXPECT_EQ(Mapped("victim"), 0);
    EXPECT_EQ(Mapped("bystander"), before);
  }
  Sequence sequence{0, 0, MakeTokens(3, 20)};
  sequence.id = bystander.Admit(bystander.Item(sequence.tokens, 20)).sequence_id();
  for (uint32_t i = 0; i < 20; ++i) tensors[0]->Put(i, sequence.tokens[i]);
  EXPECT_TRUE(Store(bystander, StoreItemOf(sequence, 0, 20, tensors, {})).ok());
  bystander.CheckStored(sequence, 20);
}

// A tensor is unregistered while stores of it run: each of them has all of its rows or is told that there is no such
// tensor.
TEST_F(TensorsTest, UnregistersBehindTheWorkThatUsesIt) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 4, 4096, 64));
  Rank rank(client(), pool, AttachTo(pool, "rank"));
  Sequence sequence{0, 0, MakeTokens(9, 512)};
  sequence.id = rank.Admit(rank.Item(sequence.tokens, 512, "", /*hashes=*/false)).sequence_id();
  int stored = 0, refused = 0;
  for (int round = 0; round < 20; ++round) {
    const auto tensors = Register(rank, {DenseTensor(pool, 512)});
    for (uint32_t i = 0; i < 512; ++i) tensors[0]->Put(i, sequence.tokens[i]);
    constexpr int kCalls = 8;
    std::vector<v1::StoreRequest> requests(kCalls);
    std::vector<v1::StoreResponse> responses(kCalls);
    std::vector<std::promise<absl::Status>> done(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      *requests[i].add_items() = StoreItemOf(sequence, 0, 512, tensors, {});
      rank.session().StoreAsync(&requests[i], &responses[i],
                                [&done, i](absl::Status status) { done[i].set_value(status); });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round * 200));
    EXPECT_TRUE(Unregister(rank, tensors[0]->id()).ok());
    EXPECT_EQ(Mappings(), 0);
    for (int i = 0; i < kCalls; ++i) {
      ASSERT_TRUE(done[i].get_future().get().ok());
      const absl::Status status = client::FirstError(responses[i].statuses());
      EXPECT_TRUE(status.ok() || status.code() == kFailedPrecondition) << status;
      ++(status.ok() ? stored : refused);
    }
    if (stored > 0) rank.CheckStored(sequence, 512);
  }
  EXPECT_GT(stored, 0);
}

// As after a restart of the daemon: the session comes back without its tensors.
TEST_F(TensorsTest, AreGoneWhenTheSessionComesBack) {
  const v1::PoolSpec pool = CreatePool(LinearPool("p", 2, 64, 64));
  client::SessionOptions options;
  options.recreate_pool = true;
  Rank rank(client(), pool, AttachTo(pool, "rank"), options);
  auto tensors = Register(rank, {DenseTensor(pool, kRows)});
  const uint64_t old_id = tensors[0]->id();
  daemon().process().Kill();
  daemon().Restart();
  ASSERT_TRUE(Eventually(absl::Seconds(30), [&] { return rank.session().generation() == 2; }));
  EXPECT_EQ(Mapped("rank"), static_cast<double>(rank.session().info().arena().size_bytes()));
  EXPECT_NE(Unregister(rank, old_id).code(), absl::StatusCode::kOk);
  ASSERT_TRUE(tensors[0]->Register(rank.session()).ok());
  Sequence sequence{0, 0, MakeTokens(3, 20)};
  sequence.id = rank.Admit(rank.Item(sequence.tokens, 20)).sequence_id();
  for (uint32_t i = 0; i < 20; ++i) tensors[0]->Put(i, sequence.tokens[i]);
  EXPECT_TRUE(Store(rank, StoreItemOf(sequence, 0, 20, tensors, {})).ok());
  rank.CheckStored(sequence, 20);
}

class BadTensorTest : public BadInputTest {
 protected:
  BadTensorTest() : BadInputTest({"--max-tensors-per-session=3", "--max-tensor-bytes-per-session=1048576"}) {}

  absl::Status Register(int descriptor, const Geometry& geometry, uint64_t* id = nullptr) {
    v1::RegisterTensorResponse response;
    const absl::Status status = rank().session().RegisterTensor(descriptor, geometry, &response);
    if (id != nullptr) *id = response.tensor_id();
    return status;
  }
  absl::Status RegisterRaw(const Geometry& geometry) {
    v1::RegisterTensorResponse response;
    return rank().session().RegisterTensor(geometry, &response);
  }
  void TearDown() override {
    EXPECT_EQ(TensorDescriptors(daemon().process().pid()), 0);
    BadInputTest::TearDown();
  }
  int Mappings() { return TensorMappings(daemon().process().pid()); }
};

TEST_F(BadTensorTest, RefusesEveryFieldThatIsOutOfItsRange) {
  constexpr uint64_t kHuge = uint64_t{1} << 63;
  constexpr uint64_t kMax = UINT64_MAX;
  const Geometry good = DenseTensor(pool(), 64);  // 2 layers of 64 rows of 48 bytes
  HostTensor memory(pool(), good);
  struct Case {
    const char* what;
    std::function<void(Geometry*)> change;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  const std::vector<Case> cases = {
      {"rows", [](Geometry* g) { g->set_rows(65); }, kInvalidArgument, {"row 64 of layer 1", "limit size_bytes 6144"}},
      {"no rows", [](Geometry* g) { g->set_rows(0); }, kInvalidArgument, {"rows: 0"}},
      {"all rows", [](Geometry* g) { g->set_rows(UINT32_MAX); }, kInvalidArgument, {"rows: 4294967295"}},
      {"size", [](Geometry* g) { g->set_size_bytes(6143); }, kInvalidArgument, {"limit size_bytes 6143"}},
      {"real size",
       [](Geometry* g) { g->set_size_bytes(6148); },
       kInvalidArgument,
       {"size_bytes: 6148", "the memory has 6144 bytes"}},
      {"offset",
       [](Geometry* g) { g->set_offset_bytes(4); },
       kInvalidArgument,
       {"offset_bytes 4", "the memory has 6144 bytes"}},
      {"offset 2^63", [](Geometry* g) { g->set_offset_bytes(kHuge); }, kInvalidArgument, {"9223372036854775808"}},
      {"offset 2^64", [](Geometry* g) { g->set_offset_bytes(kMax - 3); }, kInvalidArgument, {"18446744073709551612"}},
      {"size 2^63",
       [](Geometry* g) { g->set_size_bytes(kHuge); },
       kResourceExhausted,
       {"limit max_tensor_bytes 1048576"}},
      {"layer", [](Geometry* g) { g->add_layers(2); }, kInvalidArgument, {"layers: 2 given, limit 1"}},
      {"layers",
       [](Geometry* g) {
         for (int i = 0; i < 2000; ++i) g->add_layers(0);
       },
       kInvalidArgument,
       {"layers: 2000 given"}},
      {"layer stride", [](Geometry* g) { g->set_layer_stride_bytes(3076); }, kInvalidArgument, {"row 63 of layer 1"}},
      {"layer stride 2^63",
       [](Geometry* g) { g->set_layer_stride_bytes(kHuge); },
       kInvalidArgument,
       {"layer_stride_bytes: 9223372036854775808"}},
      {"page rows", [](Geometry* g) { g->set_page_rows(65537); }, kInvalidArgument, {"page_rows: 65537"}},
      {"part", [](Geometry* g) { g->mutable_parts(0)->set_part(1); }, kInvalidArgument, {"parts.part: 1"}},
      {"parts", [](Geometry* g) { g->clear_parts(); }, kInvalidArgument, {"parts: 0"}},
      {"many parts",
       [](Geometry* g) {
         for (int i = 0; i < 1000; ++i) g->add_parts();
       },
       kInvalidArgument,
       {"parts: 1001"}},
      {"part's offset",
       [](Geometry* g) { g->mutable_parts(0)->set_offset_bytes(4); },
       kInvalidArgument,
       {"end at byte 6148"}},
      {"part's offset 2^64",
       [](Geometry* g) { g->mutable_parts(0)->set_offset_bytes(kMax - 3); },
       kInvalidArgument,
       {"2^64 or more"}},
      {"row stride",
       [](Geometry* g) { g->mutable_parts(0)->set_row_stride_bytes(52); },
       kInvalidArgument,
       {"end at byte"}},
      {"row stride 2^63",
       [](Geometry* g) { g->mutable_parts(0)->set_row_stride_bytes(kHuge); },
       kInvalidArgument,
       {"row_stride_bytes"}},
      {"page stride",
       [](Geometry* g) { g->mutable_parts(0)->set_page_stride_bytes(48); },
       kInvalidArgument,
       {"page_stride_bytes: 48"}},
  };
  for (const Case& c : cases) {
    Geometry geometry = good;
    c.change(&geometry);
    ExpectRefused(c.what, Register(memory.descriptor(), geometry), c.code, c.message);
    EXPECT_EQ(Mappings(), 0) << c.what;
  }
  EXPECT_TRUE(Register(memory.descriptor(), good).ok());
}

TEST_F(BadTensorTest, RefusesMemoryThatIsNoneOrCanBeTakenAway) {
  const Geometry good = DenseTensor(pool(), 64);
  ExpectRefused("no memory", RegisterRaw(good), kInvalidArgument, {"memory: not given"});
  Geometry geometry = good;
  geometry.set_offered_descriptor(12345);
  ExpectRefused("never handed over", RegisterRaw(geometry), kNotFound, {"offered_descriptor: 12345"});
  for (const size_t bytes : {0, 1, 63, 65, 1000}) {
    geometry = good;
    geometry.mutable_cuda_ipc()->set_handle(std::string(bytes, 'x'));
    geometry.mutable_cuda_ipc()->set_device(rank().session().info().device());
    ExpectRefused("handle's size", RegisterRaw(geometry), kInvalidArgument,
                  {absl::StrCat("cuda_ipc.handle: ", bytes, " bytes"), "64", "expandable_segments:False"});
  }
  geometry.mutable_cuda_ipc()->set_handle(std::string(64, 'x'));
  geometry.mutable_cuda_ipc()->set_device("GPU-00000000-0000-0000-0000-000000000000");
  ExpectRefused("another GPU", RegisterRaw(geometry), kInvalidArgument, {"cuda_ipc.device", "the session is on"});
  geometry.mutable_cuda_ipc()->set_device(rank().session().info().device());
  ExpectRefused("a garbage handle", RegisterRaw(geometry), kInvalidArgument, {"cuda_ipc"});

  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, 6144), 0);
  ExpectRefused("unsealed", Register(unsealed, good), kFailedPrecondition, {"F_SEAL_SHRINK"});
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  ExpectRefused("a file", Register(file, good), absl::StatusCode::kPermissionDenied, {"memfd_create"});
  int pipes[2];
  ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
  ExpectRefused("a pipe", Register(pipes[0], good), absl::StatusCode::kPermissionDenied, {"memfd_create"});
  for (const int descriptor : {unsealed, file, pipes[0], pipes[1]}) close(descriptor);
  EXPECT_EQ(Mappings(), 0);
}

TEST_F(BadTensorTest, TakesDescriptorsOfItsOwnSessionOnceAndNotTooMany) {
  const HostTensor memory(pool(), DenseTensor(pool(), 64));
  const v1::Attached attached = rank().session().info();
  const v1::Attached other = other_rank().session().info();
  const std::string& path = attached.arena().descriptor_socket();
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  // Handed over with the other's token, it is the other's.
  const auto foreign = client::OfferDescriptor(path, other.token(), memory.descriptor(), deadline);
  ASSERT_TRUE(foreign.ok()) << foreign.status();
  Geometry geometry = memory.geometry();
  geometry.set_offered_descriptor(*foreign);
  ExpectRefused("foreign", RegisterRaw(geometry), kNotFound, {"was not handed over by this session"});
  for (const std::string& token : {std::string("wrong"), std::string(), attached.token() + "0"}) {
    const auto refused = client::OfferDescriptor(path, token, memory.descriptor(), deadline);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kPermissionDenied) << refused.status();
  }
  const auto none = client::OfferDescriptor(path, attached.token(), -1, deadline);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("no descriptor came"));
  // Used up by a call that fails.
  const auto used = client::OfferDescriptor(path, attached.token(), memory.descriptor(), deadline);
  ASSERT_TRUE(used.ok()) << used.status();
  geometry.set_offered_descriptor(*used);
  geometry.set_rows(0);
  ExpectRefused("rows", RegisterRaw(geometry), kInvalidArgument, {"rows: 0"});
  geometry.set_rows(64);
  ExpectRefused("used", RegisterRaw(geometry), kNotFound, {"or was used"});
  std::vector<uint64_t> offers;
  for (int i = 0; i < 16; ++i) {
    const auto offer = client::OfferDescriptor(path, attached.token(), memory.descriptor(), deadline);
    ASSERT_TRUE(offer.ok()) << offer.status();
    offers.push_back(*offer);
  }
  const auto many = client::OfferDescriptor(path, attached.token(), memory.descriptor(), deadline);
  EXPECT_THAT(std::string(many.status().message()), HasSubstr("16 of the session wait to be registered, limit 16"));
  for (const uint64_t offer : offers) {
    geometry.set_offered_descriptor(offer);
    geometry.set_rows(0);
    EXPECT_EQ(RegisterRaw(geometry).code(), kInvalidArgument);
  }
  // Take the other's, too.
  v1::RegisterTensorResponse response;
  geometry.set_offered_descriptor(*foreign);
  EXPECT_EQ(other_rank().session().RegisterTensor(geometry, &response).code(), kInvalidArgument);
}

TEST_F(BadTensorTest, HasALimitOfTensorsAndOfTheirBytes) {
  const HostTensor memory(pool(), DenseTensor(pool(), 64));
  EXPECT_EQ(rank().session().info().limits().max_tensors(), 3u);
  EXPECT_EQ(rank().session().info().limits().max_tensor_bytes(), 1048576u);
  uint64_t id = 0;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Register(memory.descriptor(), memory.geometry(), &id).ok());
  ExpectRefused("tensors", Register(memory.descriptor(), memory.geometry()), kResourceExhausted,
                {"limit max_tensors 3"});
  v1::UnregisterTensorRequest request;
  request.set_tensor_id(id);
  v1::UnregisterTensorResponse response;
  ASSERT_TRUE(rank().session().UnregisterTensor(request, &response).ok());
  Geometry large = memory.geometry();
  large.set_size_bytes(1048576 - 2 * 6144 + 4);
  const HostTensor large_memory(pool(), large);
  ExpectRefused("bytes", Register(large_memory.descriptor(), large), kResourceExhausted,
                {"12288 are registered", "limit max_tensor_bytes 1048576"});
  large.set_size_bytes(large.size_bytes() - 4);
  EXPECT_TRUE(Register(large_memory.descriptor(), large).ok());
}

TEST_F(BadTensorTest, RefusesIdsRowsAndSetsThatAreNotItsOwn) {
  const HostTensor memory(pool(), DenseTensor(pool(), 64));
  const HostTensor first_layer(pool(), DenseTensor(pool(), 32, {0}));
  uint64_t all = 0, part = 0, gone = 0;
  ASSERT_TRUE(Register(memory.descriptor(), memory.geometry(), &all).ok());
  ASSERT_TRUE(Register(first_layer.descriptor(), first_layer.geometry(), &part).ok());
  ASSERT_TRUE(Register(memory.descriptor(), memory.geometry(), &gone).ok());
  v1::RegisterTensorResponse foreign;
  ASSERT_TRUE(other_rank().session().RegisterTensor(memory.descriptor(), memory.geometry(), &foreign).ok());
  v1::UnregisterTensorRequest request;
  v1::UnregisterTensorResponse response;
  request.set_tensor_id(gone);
  ASSERT_TRUE(rank().session().UnregisterTensor(request, &response).ok());
  for (const auto& [id, code] : std::vector<std::pair<uint64_t, absl::StatusCode>>{{0, kNotFound},
                                                                                   {gone, kFailedPrecondition},
                                                                                   {gone + 1, kNotFound},
                                                                                   {foreign.tensor_id(), kNotFound},
                                                                                   {UINT64_MAX, kNotFound}}) {
    request.set_tensor_id(id);
    ExpectRefused("unregister", rank().session().UnregisterTensor(request, &response), code, {absl::StrCat(id)});
  }
  struct Case {
    const char* what;
    std::function<void(v1::TensorRows*)> change;
    absl::StatusCode code;
    std::vector<std::string> message;
  };
  const std::vector<Case> cases = {
      {"no tensor",
       [](v1::TensorRows* t) { t->clear_tensor_ids(); },
       kInvalidArgument,
       {"tensor_ids: 0 given, limits 1 and 2"}},
      {"many",
       [&](v1::TensorRows* t) { t->add_tensor_ids(all), t->add_tensor_ids(all); },
       kInvalidArgument,
       {"tensor_ids: 3 given"}},
      {"twice", [&](v1::TensorRows* t) { t->add_tensor_ids(all); }, kInvalidArgument, {"layer 0, part 0 is in two"}},
      {"more than all",
       [&](v1::TensorRows* t) { t->add_tensor_ids(part); },
       kInvalidArgument,
       {"layer 0, part 0 is in two"}},
      {"less than all",
       [&](v1::TensorRows* t) { t->set_tensor_ids(0, part); },
       kInvalidArgument,
       {"layer 1, part 0 of the pool is in none"}},
      {"unknown", [](v1::TensorRows* t) { t->set_tensor_ids(0, 1); }, kNotFound, {"tensor_id: 1"}},
      {"unregistered",
       [&](v1::TensorRows* t) { t->set_tensor_ids(0, gone); },
       kFailedPrecondition,
       {"was unregistered"}},
      {"foreign",
       [&](v1::TensorRows* t) { t->set_tensor_ids(0, foreign.tensor_id()); },
       kNotFound,
       {"no registered tensor of session"}},
      {"few rows",
       [](v1::TensorRows* t) { t->add_rows(1); },
       kInvalidArgument,
       {"tensor.rows: 1 given, row_count is 4"}},
      {"many rows",
       [](v1::TensorRows* t) {
         for (uint32_t i = 0; i < 5; ++i) t->add_rows(i);
       },
       kInvalidArgument,
       {"tensor.rows: 5 given"}},
      {"row",
       [](v1::TensorRows* t) {
         for (const uint32_t row : {0, 1, 2, 64}) t->add_rows(row);
       },
       kInvalidArgument,
       {"tensor.rows: 64 given, limit 63"}},
      {"huge row",
       [](v1::TensorRows* t) {
         for (const uint32_t row : {0u, 1u, 2u, UINT32_MAX}) t->add_rows(row);
       },
       kInvalidArgument,
       {"tensor.rows: 4294967295"}},
      {"first row",
       [](v1::TensorRows* t) { t->set_first_row(61); },
       kInvalidArgument,
       {"tensor.first_row: 4 rows from 61 given, the tensors have 64"}},
      {"huge first row",
       [](v1::TensorRows* t) { t->set_first_row(UINT32_MAX); },
       kInvalidArgument,
       {"tensor.first_row"}},
  };
  for (const Case& c : cases) {
    v1::StoreRequest store;
    v1::StoreItem* item = store.add_items();
    *item = StoreItem(sequence().id, 0, 4);
    item->set_source(v1::DATA_SOURCE_TENSOR);
    item->mutable_tensor()->add_tensor_ids(all);
    c.change(item->mutable_tensor());
    ExpectRefused(c.what, Call(&client::Session::Store, store), c.code, c.message);
    v1::LoadRequest load;
    v1::LoadItem* load_item = load.add_items();
    *load_item->mutable_range() = item->range();
    load_item->set_target(v1::LOAD_TARGET_TENSOR);
    *load_item->mutable_tensor() = item->tensor();
    ExpectRefused(c.what, Call(&client::Session::Load, load), c.code, c.message);
  }
  v1::StoreRequest store;
  *store.add_items() = StoreItem(sequence().id, 0, 4);
  store.mutable_items(0)->set_source(static_cast<v1::DataSource>(4));
  ExpectRefused("source", Call(&client::Session::Store, store), kInvalidArgument, {"source: 4"});
  v1::StepRequest step = GoodStep();
  step.set_source(v1::DATA_SOURCE_TENSOR);
  v1::StepResponse stepped;
  ExpectRefused("step", rank().session().Step(step, &stepped), kInvalidArgument, {"source: 3"});
}

TEST_F(BadTensorTest, NeedsAToken) {
  const auto channel = grpc::CreateChannel(daemon().address(), grpc::InsecureChannelCredentials());
  const auto stub = v1::Sessions::NewStub(channel);
  v1::RegisterTensorResponse registered;
  v1::UnregisterTensorResponse unregistered;
  for (const auto& [token, code] : std::vector<std::pair<std::string, absl::StatusCode>>{
           {"", absl::StatusCode::kUnauthenticated}, {"nonsense", absl::StatusCode::kPermissionDenied}}) {
    ExpectRefused("register",
                  RawCall(*stub, &v1::Sessions::Stub::RegisterTensor, token, DenseTensor(pool(), 64), &registered),
                  code, {});
    ExpectRefused(
        "unregister",
        RawCall(*stub, &v1::Sessions::Stub::UnregisterTensor, token, v1::UnregisterTensorRequest(), &unregistered),
        code, {});
  }
}

}  // namespace
}  // namespace stoker::system_test
