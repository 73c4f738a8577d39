// stokerctl: what an operator asks and tells a daemon. Exit codes are documented in kFooter, which --help prints.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/ctl_arguments.h"
#include "client/ctl_text.h"
#include "google/protobuf/util/json_util.h"

namespace stoker::client {
namespace {

constexpr char kDefaultServer[] = "unix:/run/stoker/stokerd.sock";
constexpr char kDefaultTimeout[] = "10s";
constexpr uint64_t kDefaultSequences = 1000;
constexpr uint32_t kSequencesPerPage = 1000;

enum ExitCode { kOk = 0, kFailed = 1, kUsage = 2, kUnreachable = 3, kTimeout = 4 };

constexpr char kFooter[] =
    "Exit codes:\n"
    "  0  done\n"
    "  1  the daemon refused or failed the call; the message says why\n"
    "  2  the command line is wrong\n"
    "  3  the daemon cannot be reached, or is not serving now (UNAVAILABLE)\n"
    "  4  no answer within --timeout (DEADLINE_EXCEEDED)\n"
    "\n"
    "With --json, standard output is one JSON object: the daemon's reply as protobuf maps it, field names as in\n"
    "proto/stoker/v1, 64-bit numbers as strings. Errors go to standard error as text.";

ProgramSpec MakeProgram() {
  ProgramSpec program;
  program.name = "stokerctl";
  program.summary = "Shows and steers a Stoker daemon.";
  program.footer = kFooter;
  program.flags = {
      {"server", "ADDRESS",
       absl::StrCat("unix:/path or host:port of the daemon. Else the environment's STOKER_SERVER,\nelse ",
                    kDefaultServer)},
      {"json", "", "print the reply as JSON"},
      {"timeout", "TIME",
       absl::StrCat("bound of each call, such as 500ms, 5s or 2m; ", kDefaultTimeout, " by default")},
      {"tls", "", "use TLS with the system's root certificates; implied by the other --tls flags"},
      {"tls-ca", "FILE", "PEM file of the root certificates that vouch for the daemon"},
      {"tls-cert", "FILE", "PEM file of the client's certificate (mTLS; needs --tls-key)"},
      {"tls-key", "FILE", "PEM file of the client's key"},
      {"tls-server-name", "NAME", "name in the daemon's certificate, where it is not the host of --server"},
      {"version", "", "print the version and exit"},
      {"help", "", "print help, for the program or for the command, and exit"},
  };
  const std::vector<FlagSpec> spec_flags = {
      {"layers", "N", "layers of the model, 1 to 1024 (required)"},
      {"row-layout", "NAME", "linear (default), split-kv or dsv4"},
      {"row-bytes", "N", "bytes of a row, or of its K part, a multiple of 4; dsv4: 584 by default"},
      {"v-row-bytes", "N", "bytes of the V part (split-kv)"},
      {"block-rows", "N", "rows of a block, a power of two from 16 to 1024; 64 by default"},
      {"prefix-rows", "N", "rows that one block hash stands for; as block-rows by default"},
      {"blocks", "N", "number of blocks (required)"},
  };
  program.commands = {
      {{"status"}, {}, "Describes the daemon: state, memory, sessions, pools.", "", {}},
      {{"pools"}, {}, "Lists the pools; as 'pools list'.", "", {}},
      {{"pools", "list"}, {}, "Lists the pools and how full they are.", "", {}},
      {{"pools", "show"}, {"NAME"}, "Describes one pool.", "", {}},
      {{"pools", "create"},
       {"NAME"},
       "Creates a pool.",
       "An equal pool that exists already is left as it is. The memory is taken at once:\n"
       "layers x blocks x block-rows x bytes of a row.",
       spec_flags},
      {{"pools", "delete"},
       {"NAME"},
       "Frees a pool and all its rows.",
       "The daemon refuses while sessions are attached to it or sequences are open.",
       {}},
      {{"sessions"}, {}, "Lists the sessions: what they hold and how often rows were hot.", "", {}},
      {{"sequences"},
       {},
       "Lists the sequences of one pool.",
       "",
       {{"pool", "NAME", "the pool (required)"},
        {"limit", "N", absl::StrCat("most sequences to list, 0 for all; ", kDefaultSequences, " by default")}}},
      {{"drain"}, {}, "Refuses new sessions and tells the attached ones; steps go on.", "", {}},
      {{"undrain"}, {}, "Accepts sessions again.", "", {}},
      {{"evict"},
       {"SESSION"},
       "Ends a session as if its engine had died.",
       "SESSION is the id that 'stokerctl sessions' shows, decimal or 0x and hexadecimal.",
       {}},
  };
  return program;
}

absl::string_view LayoutText(v1::RowLayout layout) {
  switch (layout) {
    case v1::ROW_LAYOUT_LINEAR:
      return "linear";
    case v1::ROW_LAYOUT_SPLIT_KV:
      return "split-kv";
    case v1::ROW_LAYOUT_DSV4_PAGED:
      return "dsv4";
    default:
      return "unknown";
  }
}

absl::string_view StateText(v1::DaemonState state) {
  switch (state) {
    case v1::DAEMON_STATE_STARTING:
      return "starting";
    case v1::DAEMON_STATE_SERVING:
      return "serving";
    case v1::DAEMON_STATE_DRAINING:
      return "draining";
    default:
      return "unknown";
  }
}

std::string RowBytesText(const v1::PoolSpec& spec) {
  return spec.row_layout() == v1::ROW_LAYOUT_SPLIT_KV ? absl::StrCat(spec.row_bytes(), "+", spec.v_row_bytes())
                                                      : absl::StrCat(spec.row_bytes());
}

std::string PoolsText(const google::protobuf::RepeatedPtrField<v1::Pool>& pools) {
  if (pools.empty()) return "no pools\n";
  constexpr Table::Align kRight = Table::Align::kRight;
  Table table({{"POOL"},
               {"LAYOUT"},
               {"ROW BYTES", kRight},
               {"LAYERS", kRight},
               {"CAPACITY", kRight},
               {"BLOCKS", kRight},
               {"FREE", kRight},
               {"REFERENCED", kRight},
               {"CACHED", kRight},
               {"SEQUENCES", kRight},
               {"SESSIONS", kRight}});
  for (const v1::Pool& pool : pools) {
    const v1::PoolUsage& usage = pool.usage();
    table.Add({PlainText(pool.spec().name()), std::string(LayoutText(pool.spec().row_layout())),
               RowBytesText(pool.spec()), absl::StrCat(pool.spec().layers()), BytesText(usage.capacity_bytes()),
               absl::StrCat(pool.spec().blocks()), absl::StrCat(usage.free_blocks()),
               absl::StrCat(usage.referenced_blocks()), absl::StrCat(usage.cached_blocks()),
               absl::StrCat(usage.sequences()), absl::StrCat(usage.sessions())});
  }
  return table.ToString();
}

// Pairs of a name and a value, without a header.
std::string PairsText(const std::vector<std::pair<std::string, std::string>>& pairs) {
  size_t width = 0;
  for (const auto& pair : pairs) width = std::max(width, pair.first.size());
  std::string text;
  for (const auto& [name, value] : pairs) {
    absl::StrAppend(&text, name, std::string(width - name.size() + 2, ' '), value, "\n");
  }
  return text;
}

std::string PoolText(const v1::Pool& pool) {
  const v1::PoolSpec& spec = pool.spec();
  const v1::PoolUsage& usage = pool.usage();
  const uint64_t blocks = spec.blocks();
  const auto of_blocks = [&](uint32_t count) { return absl::StrCat(count, " (", ShareText(count, blocks), ")"); };
  return PairsText({{"pool", PlainText(spec.name())},
                    {"row layout", std::string(LayoutText(spec.row_layout()))},
                    {"row bytes", RowBytesText(spec)},
                    {"layers", absl::StrCat(spec.layers())},
                    {"block rows", absl::StrCat(spec.block_rows())},
                    {"prefix rows", absl::StrCat(spec.prefix_rows())},
                    {"capacity", BytesText(usage.capacity_bytes())},
                    {"blocks", absl::StrCat(blocks)},
                    {"  free", of_blocks(usage.free_blocks())},
                    {"  referenced", of_blocks(usage.referenced_blocks())},
                    {"  cached", of_blocks(usage.cached_blocks())},
                    {"sequences", absl::StrCat(usage.sequences())},
                    {"sessions", absl::StrCat(usage.sessions())}});
}

std::string ToText(const v1::GetStatusResponse& status) {
  std::vector<std::string> devices;
  for (const std::string& device : status.devices()) devices.push_back(PlainText(device));
  return absl::StrCat(
      PairsText(
          {{"state", std::string(StateText(status.state()))},
           {"version", PlainText(status.version())},
           {"uptime", SpanText(absl::Milliseconds(static_cast<int64_t>(status.uptime_ms())))},
           {"boot epoch", absl::StrCat(status.boot_epoch())},
           {"devices", absl::StrJoin(devices, ", ")},
           {"sessions", absl::StrCat(status.sessions(), " of ", status.max_sessions())},
           {"hot buffers", absl::StrCat(BytesText(status.hot_bytes()), " of ", BytesText(status.max_hot_bytes()))},
           {"pools", absl::StrCat(BytesText(status.pool_bytes()), " of ", BytesText(status.max_pool_bytes()))}}),
      "\n", PoolsText(status.pools()));
}

std::string ToText(const v1::ListPoolsResponse& response) { return PoolsText(response.pools()); }
std::string ToText(const v1::GetPoolResponse& response) { return PoolText(response.pool()); }
std::string ToText(const v1::CreatePoolResponse& response) { return PoolText(response.pool()); }

std::string ToText(const v1::ListSessionsResponse& response) {
  if (response.sessions().empty()) return "no sessions\n";
  constexpr Table::Align kRight = Table::Align::kRight;
  Table table({{"SESSION", kRight},
               {"NAME"},
               {"POOL"},
               {"DEVICE"},
               {"ATTACHED", kRight},
               {"ARENA", kRight},
               {"SEQUENCES", kRight},
               {"BLOCKS", kRight},
               {"STEPS", kRight},
               {"LOOKUPS", kRight},
               {"HOT", kRight},
               {"MISS", kRight}});
  for (const v1::SessionInfo& session : response.sessions()) {
    const v1::LookupTotals& lookups = session.lookups();
    const uint64_t total = lookups.hot() + lookups.newest() + lookups.resident() + lookups.miss() +
                           lookups.duplicate() + lookups.invalid();
    table.Add({absl::StrCat(session.session_id()), PlainText(session.name()), PlainText(session.pool()),
               PlainText(session.device()), SpanText(absl::Milliseconds(static_cast<int64_t>(session.attached_ms()))),
               BytesText(session.arena_bytes()), absl::StrCat(session.open_sequences(), "/", session.state_rows()),
               absl::StrCat(session.reserved_blocks(), "/", session.max_reserved_blocks()),
               absl::StrCat(session.steps()), absl::StrCat(total), ShareText(lookups.hot(), total),
               ShareText(lookups.miss(), total)});
  }
  return table.ToString();
}

std::string ToText(const v1::ListSequencesResponse& response) {
  if (response.sequences().empty()) return "no sequences\n";
  constexpr Table::Align kRight = Table::Align::kRight;
  Table table({{"SEQUENCE", kRight},
               {"KEY"},
               {"STORED ROWS", kRight},
               {"MAX ROWS", kRight},
               {"BLOCKS", kRight},
               {"WRITER", kRight},
               {"SESSIONS"}});
  for (const v1::SequenceInfo& sequence : response.sequences()) {
    table.Add({absl::StrCat(sequence.sequence_id()), PlainText(sequence.sequence_key()),
               absl::StrCat(sequence.stored_rows()), absl::StrCat(sequence.max_rows()), absl::StrCat(sequence.blocks()),
               sequence.writer_session_id() == 0 ? "-" : absl::StrCat(sequence.writer_session_id()),
               sequence.session_ids().empty() ? "-" : absl::StrJoin(sequence.session_ids(), ",")});
  }
  return absl::StrCat(table.ToString(), response.more() ? "there are more: raise --limit\n" : "");
}

std::string ToText(const v1::DeletePoolResponse&) { return "deleted\n"; }
std::string ToText(const v1::DrainResponse&) { return "draining: new sessions are refused\n"; }
std::string ToText(const v1::UndrainResponse&) { return "serving: new sessions are accepted\n"; }
std::string ToText(const v1::EvictSessionResponse&) { return "evicted\n"; }

// What a command prints, or why it failed.
template <typename Response>
absl::StatusOr<std::string> Render(const absl::StatusOr<Response>& response, bool json) {
  if (!response.ok()) return response.status();
  if (!json) return ToText(*response);
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(*response, &text, options);
  if (!status.ok())
    return absl::InternalError(absl::StrCat("the reply cannot be printed as JSON: ", status.ToString()));
  return text;
}

absl::StatusOr<v1::CreatePoolRequest> MakeCreatePool(const Invocation& invocation) {
  v1::CreatePoolRequest request;
  v1::PoolSpec& spec = *request.mutable_spec();
  spec.set_name(invocation.arguments[0]);
  const std::string layout = invocation.Get("row-layout", "linear");
  if (layout == "linear") {
    spec.set_row_layout(v1::ROW_LAYOUT_LINEAR);
  } else if (layout == "split-kv") {
    spec.set_row_layout(v1::ROW_LAYOUT_SPLIT_KV);
  } else if (layout == "dsv4") {
    spec.set_row_layout(v1::ROW_LAYOUT_DSV4_PAGED);
    spec.set_row_bytes(584);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("--row-layout '", layout, "' is not linear, split-kv or dsv4"));
  }
  // Ranges are the daemon's business; here a number must be one.
  const struct {
    const char* flag;
    void (v1::PoolSpec::*set)(uint32_t);
    bool required;
  } numbers[] = {
      {"layers", &v1::PoolSpec::set_layers, true},
      {"row-bytes", &v1::PoolSpec::set_row_bytes, spec.row_bytes() == 0},
      {"v-row-bytes", &v1::PoolSpec::set_v_row_bytes, spec.row_layout() == v1::ROW_LAYOUT_SPLIT_KV},
      {"block-rows", &v1::PoolSpec::set_block_rows, false},
      {"prefix-rows", &v1::PoolSpec::set_prefix_rows, false},
      {"blocks", &v1::PoolSpec::set_blocks, true},
  };
  for (const auto& number : numbers) {
    if (!invocation.Has(number.flag)) {
      if (number.required) return absl::InvalidArgumentError(absl::StrCat("'pools create' needs --", number.flag));
      continue;
    }
    absl::StatusOr<uint64_t> value = ParseNumber(absl::StrCat("--", number.flag), invocation.Get(number.flag), 0,
                                                 std::numeric_limits<uint32_t>::max());
    if (!value.ok()) return value.status();
    (spec.*number.set)(static_cast<uint32_t>(*value));
  }
  return request;
}

// All pages up to `limit` sequences (0: all) in one response.
absl::StatusOr<v1::ListSequencesResponse> ListSequences(const Client& client, const std::string& pool, uint64_t limit) {
  v1::ListSequencesResponse all;
  v1::ListSequencesRequest request;
  request.set_pool(pool);
  for (;;) {
    const uint64_t left = limit == 0 ? kSequencesPerPage : limit - static_cast<uint64_t>(all.sequences_size());
    request.set_page_size(static_cast<uint32_t>(std::min<uint64_t>(left, kSequencesPerPage)));
    absl::StatusOr<v1::ListSequencesResponse> page = client.ListSequences(request);
    if (!page.ok()) return page.status();
    all.set_boot_epoch(page->boot_epoch());
    all.set_more(page->more());
    all.mutable_sequences()->MergeFrom(page->sequences());
    const bool full = limit != 0 && static_cast<uint64_t>(all.sequences_size()) >= limit;
    if (!page->more() || page->sequences().empty() || full) return all;
    request.set_after_sequence_id(page->sequences().rbegin()->sequence_id());
  }
}

// A command line that parsed but cannot be run is told apart from a call that failed by `usage`.
struct Outcome {
  absl::StatusOr<std::string> output;
  bool usage = false;
};

Outcome WrongUsage(const absl::Status& status) { return {status, true}; }

Outcome Run(const Invocation& invocation) {
  const bool json = invocation.Has("json");
  ClientOptions options;
  options.connect_timeout = absl::ZeroDuration();  // the call itself finds out, at once when nobody listens
  absl::StatusOr<absl::Duration> timeout = ParseTimeout("--timeout", invocation.Get("timeout", kDefaultTimeout));
  if (!timeout.ok()) return WrongUsage(timeout.status());
  options.call_timeout = *timeout;
  if (invocation.Has("tls") || invocation.Has("tls-ca") || invocation.Has("tls-cert") || invocation.Has("tls-key") ||
      invocation.Has("tls-server-name")) {
    options.tls = TlsOptions{invocation.Get("tls-ca"), invocation.Get("tls-cert"), invocation.Get("tls-key"),
                             invocation.Get("tls-server-name")};
  }
  const char* const environment = std::getenv("STOKER_SERVER");
  const bool has_environment = environment != nullptr && *environment != '\0';
  const std::string server = invocation.Get("server", has_environment ? environment : kDefaultServer);

  // Checked before the daemon is asked.
  v1::CreatePoolRequest create;
  v1::EvictSessionRequest evict;
  uint64_t limit = kDefaultSequences;
  const std::string command = absl::StrJoin(invocation.words, " ");
  if (command == "pools create") {
    absl::StatusOr<v1::CreatePoolRequest> request = MakeCreatePool(invocation);
    if (!request.ok()) return WrongUsage(request.status());
    create = *std::move(request);
  } else if (command == "evict") {
    absl::StatusOr<uint64_t> session =
        ParseNumber("SESSION", invocation.arguments[0], 1, std::numeric_limits<uint64_t>::max());
    if (!session.ok()) return WrongUsage(session.status());
    evict.set_session_id(*session);
  } else if (command == "sequences") {
    if (!invocation.Has("pool")) return WrongUsage(absl::InvalidArgumentError("'sequences' needs --pool"));
    if (invocation.Has("limit")) {
      absl::StatusOr<uint64_t> value =
          ParseNumber("--limit", invocation.Get("limit"), 0, std::numeric_limits<int32_t>::max());
      if (!value.ok()) return WrongUsage(value.status());
      limit = *value;
    }
  }
  absl::StatusOr<Client> client = Client::Connect(server, options);
  if (!client.ok()) return WrongUsage(client.status());

  if (command == "status") return {Render(client->GetStatus(), json)};
  if (command == "pools" || command == "pools list") return {Render(client->ListPools(), json)};
  if (command == "pools show") {
    v1::GetPoolRequest request;
    request.set_name(invocation.arguments[0]);
    return {Render(client->GetPool(request), json)};
  }
  if (command == "pools create") return {Render(client->CreatePool(create), json)};
  if (command == "pools delete") {
    v1::DeletePoolRequest request;
    request.set_name(invocation.arguments[0]);
    return {Render(client->DeletePool(request), json)};
  }
  if (command == "sessions") return {Render(client->ListSessions(), json)};
  if (command == "sequences") return {Render(ListSequences(*client, invocation.Get("pool"), limit), json)};
  if (command == "drain") return {Render(client->Drain(), json)};
  if (command == "undrain") return {Render(client->Undrain(), json)};
  return {Render(client->EvictSession(evict), json)};
}

int Fail(const absl::Status& status, absl::string_view hint) {
  const std::string text = absl::StrCat("stokerctl: ", status.message(), hint, "\n");
  std::fputs(text.c_str(), stderr);
  return kFailed;
}

int Print(const std::string& text) {
  const bool written = std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
  return written ? kOk : Fail(absl::DataLossError("standard output cannot be written"), "");
}

int Main(const std::vector<std::string>& arguments) {
  const ProgramSpec program = MakeProgram();
  absl::StatusOr<Invocation> invocation = ParseArguments(program, arguments);
  if (!invocation.ok()) {
    Fail(invocation.status(), "; see 'stokerctl --help'");
    return kUsage;
  }
  if (invocation->Has("version")) return Print(absl::StrCat("stokerctl ", STOKER_VERSION, "\n"));
  if (invocation->Has("help")) return Print(HelpText(program, invocation->words));
  if (invocation->command == nullptr) {
    std::fputs(HelpText(program, {}).c_str(), stderr);
    return kUsage;
  }
  const Outcome outcome = Run(*invocation);
  if (outcome.output.ok()) return Print(*outcome.output);
  const absl::Status& status = outcome.output.status();
  if (outcome.usage) {
    Fail(status, absl::StrCat("; see 'stokerctl ", absl::StrJoin(invocation->words, " "), " --help'"));
    return kUsage;
  }
  Fail(status, absl::StrCat(" (", absl::StatusCodeToString(status.code()), ")"));
  if (absl::IsUnavailable(status)) return kUnreachable;
  return absl::IsDeadlineExceeded(status) ? kTimeout : kFailed;
}

}  // namespace
}  // namespace stoker::client

int main(int argc, char** argv) {
  return stoker::client::Main(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
}
