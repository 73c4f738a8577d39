#include "tests/kernels/batch_case.h"

#include <algorithm>
#include <numeric>

#include "tests/kernels/resolve_random.h"
#include "tests/reference/reference.h"

namespace stoker::kernels {
namespace {

constexpr uint64_t kFirstSequence = 100;

template <typename T>
T Pick(std::mt19937_64& rng, const std::vector<T>& choices) {
  return choices[kernels::Draw(rng, 0, static_cast<int32_t>(choices.size()) - 1)];
}

}  // namespace

BatchCase::BatchCase(const BatchShape& shape) : shape_(shape) {
  const auto rows = static_cast<size_t>(shape.max_rows);
  const auto state_rows = static_cast<size_t>(shape.state_rows);
  state_ = image_.Add("state", std::vector<uint64_t>(sizeof(PlaneState) / sizeof(uint64_t)));
  rows_ = image_.Add("mail.rows", std::vector<int32_t>{shape.max_rows});
  sequence_ids_ = image_.Add("mail.sequence_ids", std::vector<uint64_t>(rows));
  state_rows_ = image_.Add("mail.state_rows", std::vector<int32_t>(rows, -1));
  lengths_ = image_.Add("mail.lengths", std::vector<int32_t>(rows));
  commits_ = image_.Add("mail.commits", std::vector<int32_t>(rows));
  statuses_ = image_.Add<int32_t>("mail.statuses", rows);
  plan_rows_ = image_.Add<int32_t>("plan.rows", 1);
  plan_state_rows_ = image_.Add<int32_t>("plan.state_rows", rows);
  plan_lengths_ = image_.Add<int32_t>("plan.lengths", rows);
  newest_pool_rows_ = image_.Add<int32_t>("plan.newest_pool_rows", rows);
  newest_hot_rows_ = image_.Add<int32_t>("plan.newest_hot_rows", rows);
  plan_words_ = image_.Add<int32_t>("plan.words", rows);
  commit_hot_rows_ = image_.Add<int32_t>("plan.commit_hot_rows", rows);
  commit_pool_rows_ = image_.Add<int32_t>("plan.commit_pool_rows", rows);
  claims_ = image_.Add("plan.claims", std::vector<int32_t>(state_rows, kUnclaimed));
  entries_ = image_.Add("entries", std::vector<StateRowEntry>(state_rows));
  block_table_ = image_.Add(
      "block_table", std::vector<int32_t>(state_rows * static_cast<size_t>(shape.columns + shape.stride_padding)));
  committed_ = image_.Add("committed_rows", std::vector<uint64_t>{0});
  ended_ = image_.Add<uint32_t>("ended", 1);
  words_ = host_.Add("words", std::vector<SequenceWord>(static_cast<size_t>(shape.word_count)));
  for (int32_t w = 0; w < shape.word_count; ++w) {
    word(w) = {.stored_rows = 0, .max_rows = static_cast<int32_t>(shape.max_sequence_rows), .writer = kSession};
  }
  for (int32_t r = 0; r < shape.state_rows; ++r) {
    entry(r) = {.sequence_id = kFirstSequence + static_cast<uint64_t>(r), .word = r, .reserved = 0};
    for (int32_t column = 0; column < shape.columns; ++column) block(r, column) = shape.columns * r + column;
  }
}

BatchArgs BatchCase::Args(std::byte* device, std::byte* host) const {
  BatchArgs args;
  args.state = reinterpret_cast<PlaneState*>(state_.In(device));
  args.raises_step = shape_.raises_step;
  args.mail = {.rows = rows_.In(device),
               .sequence_ids = sequence_ids_.In(device),
               .state_rows = state_rows_.In(device),
               .lengths = lengths_.In(device),
               .commits = commits_.In(device),
               .statuses = statuses_.In(device)};
  args.plan = {.rows = plan_rows_.In(device),
               .state_rows = plan_state_rows_.In(device),
               .lengths = plan_lengths_.In(device),
               .newest_pool_rows = newest_pool_rows_.In(device),
               .newest_hot_rows = newest_hot_rows_.In(device),
               .words = plan_words_.In(device),
               .commit_hot_rows = commit_hot_rows_.In(device),
               .commit_pool_rows = commit_pool_rows_.In(device),
               .claims = claims_.In(device)};
  args.max_rows = shape_.max_rows;
  args.top_k = shape_.top_k;
  args.hot_rows = shape_.hot_rows;
  args.max_sequence_rows = shape_.max_sequence_rows;
  args.one_row = shape_.one_row;
  args.session = kSession;
  args.entries = entries_.In(device);
  args.state_rows = shape_.state_rows;
  args.words = words_.In(host);
  args.word_count = shape_.word_count;
  args.block_table = block_table_.In(device);
  args.block_table_stride = shape_.columns + shape_.stride_padding;
  args.block_table_columns = shape_.columns;
  args.block_rows = shape_.block_rows;
  args.pool_rows = int64_t{shape_.blocks} * shape_.block_rows - shape_.missing_pool_rows;
  args.region_rows = shape_.region_rows;
  args.newest_row = shape_.newest_row;
  if (shape_.optional_outputs) {
    args.committed_rows = committed_.In(device);
    args.ended = ended_.In(device);
  }
  return args;
}

void BatchCase::SetRow(int32_t i, int32_t state_row, int32_t length, int32_t commit) {
  sequence_ids()[i] = state_row < 0 ? 0 : kFirstSequence + static_cast<uint64_t>(state_row);
  state_rows()[i] = state_row;
  lengths()[i] = length;
  commits()[i] = commit;
}

std::vector<BatchStatus> BatchCase::Statuses() const {
  std::vector<BatchStatus> statuses;
  for (const int32_t status : image_.Values(statuses_)) statuses.push_back(static_cast<BatchStatus>(status));
  return statuses;
}

void BatchCase::PoisonPlan() {
  for (const auto& region : {plan_rows_, plan_state_rows_, plan_lengths_, newest_pool_rows_, newest_hot_rows_,
                             plan_words_, commit_hot_rows_, commit_pool_rows_}) {
    image_.Poison(region);
  }
}

void BatchCase::PoisonCommits() {
  image_.Poison(commit_hot_rows_);
  image_.Poison(commit_pool_rows_);
}

testing::AssertionResult BatchCase::Run(Bench& bench, BatchOperation operation) {
  Image want = image_;
  Image want_host = host_;
  const BatchArgs args = Args(want.data(), want_host.data());
  if (const absl::Status status = Validate(args); !status.ok()) {
    return testing::AssertionFailure() << "the case is wrong: " << status;
  }
  const absl::Status status = bench.Run(image_, host_, [&](Stream& stream, std::byte* device, std::byte* host) {
    const BatchArgs on_device = Args(device, host);
    return operation == BatchOperation::kBegin  ? stream.BeginBatch(on_device)
           : operation == BatchOperation::kPlan ? stream.PlanCommits(on_device)
                                                : stream.EndBatch(on_device);
  });
  if (!status.ok()) return testing::AssertionFailure() << status;
  if (operation == BatchOperation::kBegin) reference::BeginBatch(args);
  if (operation == BatchOperation::kPlan) reference::PlanCommits(args);
  if (operation == BatchOperation::kEnd) reference::EndBatch(args);
  const testing::AssertionResult equal = image_.Equals(want);
  return equal ? host_.Equals(want_host) : equal;
}

BatchShape RandomBatchShape(std::mt19937_64& rng) {
  BatchShape shape;
  shape.max_rows =
      Chance(rng, 0.9) ? Draw(rng, 1, 40) : Pick<int32_t>(rng, {64, 1023, 1024, 1025, 2100, kMaxBatchRows});
  shape.top_k = Draw(rng, 1, 8);
  shape.hot_rows = shape.top_k * Draw(rng, 1, 5) + Draw(rng, 0, shape.top_k - 1);
  shape.state_rows = Pick<int32_t>(rng, {1, 2, 5, 20, 300});
  shape.word_count = shape.state_rows + Draw(rng, 0, 3);
  shape.block_rows = Pick<int32_t>(rng, {1, 3, 4, 16});
  shape.columns = Draw(rng, 0, 12);
  shape.blocks = Draw(rng, 1, 60);
  shape.missing_pool_rows = Draw(rng, 0, shape.block_rows - 1);
  shape.stride_padding = std::max(Draw(rng, -3, 3), shape.columns == 0 ? 1 : 0);
  shape.newest_row = shape.hot_rows + Draw(rng, 0, 4);
  shape.region_rows = shape.newest_row + shape.block_rows + Draw(rng, 0, 2);
  shape.max_sequence_rows = Draw(rng, 1, 60);
  shape.one_row = Chance(rng, 0.2);
  shape.raises_step = Chance(rng, 0.5);
  shape.optional_outputs = Chance(rng, 0.7);
  return shape;
}

void RandomDaemon(BatchCase& c, std::mt19937_64& rng) {
  const BatchShape& shape = c.shape();
  std::vector<int32_t> words(shape.word_count);
  std::iota(words.begin(), words.end(), 0);
  std::shuffle(words.begin(), words.end(), rng);
  const double wrong = Chance(rng, 0.5) ? 0 : 0.06;
  for (int32_t r = 0; r < shape.state_rows; ++r) {
    c.entry(r).word = words[r];
    if (Chance(rng, wrong)) c.entry(r).word = Pick<int32_t>(rng, {-1, kLowest, shape.word_count, kHighest});
    if (Chance(rng, wrong)) c.entry(r).sequence_id = 0;
    for (int32_t column = 0; column < shape.columns; ++column) {
      c.block(r, column) = Draw(rng, 0, shape.blocks - 1);
      if (Chance(rng, wrong)) c.block(r, column) = Pick<int32_t>(rng, {-1, kLowest, shape.blocks, kHighest});
    }
  }
  const auto most = static_cast<int32_t>(shape.max_sequence_rows);
  for (int32_t w = 0; w < shape.word_count; ++w) {
    SequenceWord& word = c.word(w);
    word.max_rows = Chance(rng, 0.8) ? most + Draw(rng, -1, 1) : Draw(rng, 0, most);
    word.stored_rows = Draw(rng, 0, std::max(word.max_rows, 0));
    if (Chance(rng, 0.2)) word.writer = Pick<uint64_t>(rng, {0, 1, BatchCase::kSession + 1, ~uint64_t{0}});
  }
}

void RandomEngine(BatchCase& c, std::mt19937_64& rng) {
  const BatchShape& shape = c.shape();
  c.rows() = Chance(rng, 0.95) ? Draw(rng, std::max(0, shape.max_rows - 5), shape.max_rows)
                               : Pick<int32_t>(rng, {kLowest, -1, 0, 1, shape.max_rows + 1, kHighest});
  std::vector<int32_t> order(shape.state_rows);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  size_t next = 0;
  for (int32_t i = 0; i < shape.max_rows;) {
    // Runs, of each state row one, and then of any.
    const int32_t r = next < order.size() ? order[next++] : Draw(rng, 0, shape.state_rows - 1);
    const int32_t w = c.entry(r).word;
    int32_t length = w >= 0 && w < shape.word_count ? c.word(w).stored_rows + 1 : Draw(rng, 1, 20);
    if (Chance(rng, 0.1)) length += Draw(rng, -3, 3);
    const int32_t run = Chance(rng, 0.6) ? 1 : Draw(rng, 1, 5);
    for (int32_t k = 0; k < run && i < shape.max_rows; ++k, ++i) {
      c.SetRow(i, r, length, Draw(rng, 0, 3));
      length += Chance(rng, 0.9) ? 1 : Draw(rng, -1, 2);
    }
    if (Chance(rng, 0.1) && i < shape.max_rows) c.SetRow(i++, -1, Draw(rng, -5, 5), Draw(rng, 0, 1));
  }
  const double wrong = Chance(rng, 0.3) ? 0 : 0.04;
  const auto most = static_cast<int32_t>(shape.max_sequence_rows);
  for (int32_t i = 0; i < shape.max_rows; ++i) {
    if (Chance(rng, wrong)) c.sequence_ids()[i] = Pick<uint64_t>(rng, {0, 1, kFirstSequence, ~uint64_t{0}, rng()});
    if (Chance(rng, wrong)) {
      c.state_rows()[i] = Pick<int32_t>(rng, {kLowest, -1, 0, shape.state_rows - 1, shape.state_rows, kHighest});
    }
    if (Chance(rng, wrong)) {
      c.lengths()[i] = Pick<int32_t>(rng, {kLowest, -1, 0, 1, most, most + 1, kHighest, static_cast<int32_t>(rng())});
    }
    if (Chance(rng, wrong)) c.commits()[i] = Pick<int32_t>(rng, {kLowest, -1, 0, 1, kHighest});
  }
}

}  // namespace stoker::kernels
