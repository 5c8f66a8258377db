#include "http.h"

#include <charconv>
#include <cmath>
#include <iostream>
#include <random>
#include <set>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <nlohmann/json.hpp>

#include "tensors.h"

namespace rayrec {
namespace {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using net::ip::tcp;
using nlohmann::json;
using Request = http::request<http::string_body>;
using Response = http::response<http::string_body>;
using Stream = beast::tcp_stream;

constexpr const char* kJson = "application/json";
constexpr size_t kMaxHead = 16u << 10;
constexpr const char *kRequestId = "X-Request-Id", *kJsonBytes = "Inference-Header-Content-Length";

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

// The shortest text that gives the float32 back, however small.
void write_number(std::string& out, float number) {
  char room[32];
  out.append(room, std::to_chars(room, room + sizeof room, number).ptr);
}

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string request_id(std::string_view given) {
  const bool fine = !given.empty() && given.size() <= 128 && std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (fine) return std::string(given);
  static thread_local std::mt19937_64 drawn{std::random_device{}()};
  char room[33];
  std::snprintf(room, sizeof room, "%016llx%016llx", static_cast<unsigned long long>(drawn()), static_cast<unsigned long long>(drawn()));
  return room;
}

struct Path {
  std::string model, version, verb;  // of /v2/models/MODEL[/versions/VERSION][/VERB]
};

std::optional<Path> v2_path(std::string_view path) {
  constexpr std::string_view root = "/v2/models/";
  if (!path.starts_with(root)) return std::nullopt;
  std::vector<std::string> parts;
  for (path.remove_prefix(root.size());;) {
    const size_t slash = path.find('/');
    parts.emplace_back(path.substr(0, slash));
    if (slash == std::string_view::npos) break;
    path.remove_prefix(slash + 1);
  }
  Path made{parts[0], "", ""};
  size_t at = 1;
  if (parts.size() > 2 && parts[1] == "versions") made.version = parts[2], at = 3;
  if (parts.size() == at + 1 && (parts[at] == "infer" || parts[at] == "ready")) made.verb = parts[at++];
  return parts.size() == at ? std::optional(made) : std::nullopt;
}

std::string_view path_of(const Request& request) {
  const std::string_view path = view(request.target());
  return path.substr(0, path.find('?'));
}

class Server {
 public:
  explicit Server(const Options& options)
      : options_(options), clients_(options.token_files, options.requests_per_s),
        versions_(options.path, options.threads, options.cores, std::chrono::milliseconds(options.look_ms)) {}

  int run();

 private:
  // A request to score; `job` is handed on.
  struct Asked {
    std::shared_ptr<const Model> model;
    std::optional<Path> place;  // in the open inference protocol
    InferRequest infer;
    Job job;
    size_t rows = 0;
  };
  struct Session {
    Stream* stream;
    bool idle = true;
  };

  net::awaitable<void> accept(tcp::acceptor& acceptor);
  net::awaitable<void> session(tcp::socket socket);
  net::awaitable<Response> answer(const Request& request, const std::string& id, Clock::time_point begin);
  std::optional<Response> unscored(const Request& request);
  Asked read(const Request& request, Clock::time_point begin) const;
  Response written(const Asked& asked, const std::vector<float>& scores, const std::string& id) const;
  net::awaitable<std::vector<float>> scored(Job job);
  Refused too_long() const;
  Response reply(http::status status, std::string body, const char* kind = kJson) const;
  Response refusal(const Refused& error) const;
  json schema() const;
  void stop(tcp::acceptor& acceptor);

  const Options& options_;
  Clients clients_;
  Metrics metrics_;
  Versions versions_;
  std::optional<Scorer> scorer_;
  net::io_context io_{2};
  std::mutex turn_;
  std::set<Session*> sessions_;
  std::atomic<bool> stopping_ = false;
};

Response Server::reply(http::status status, std::string body, const char* kind) const {
  Response made{status, 11};
  made.set(http::field::content_type, kind);
  made.body() = std::move(body);
  return made;
}

Response Server::refusal(const Refused& error) const {
  json body{{"error", error.what()}};
  const auto model = versions_.take();
  for (const Problem& one : error.problems) {
    json feature;
    for (const SparseFeature& its : model->mapping().sparse())
      if (feature.is_null() && (its.column == one.column || its.weight_column == one.column)) feature = its.name;
    for (const DenseFeature& its : model->mapping().dense())
      if (feature.is_null() && its.column == one.column) feature = its.name;
    body["errors"].push_back({{"feature", feature}, {"row", one.row < 0 ? json() : json(one.row)}, {"column", one.column},
                              {"value", one.value}, {"problem", one.problem}, {"fix", one.fix}});
  }
  Response made = reply(static_cast<http::status>(error.status), text_of(body));
  if (error.status == 429 || error.status == 503) made.set(http::field::retry_after, "1");
  return made;
}

json Server::schema() const {
  const auto model = versions_.take();
  json sparse = model->mapping().schema().value("sparse", json::array());
  for (json& one : sparse)
    if (one.contains("mapping")) one["mapping"].erase("path");
  const json& given = model->mapping().schema();
  const Limits& limits = options_.limits;
  return {{"model", options_.name}, {"version", model->version()}, {"labels", model->labels()},
          {"derived", given.value("derived", json::array())}, {"column_types", given.value("column_types", json::object())},
          {"dense", given.value("dense", json::array())}, {"sparse", sparse},
          {"limits", {{"rows", limits.rows}, {"body_bytes", limits.body_bytes}, {"ids", limits.ids}, {"queue", limits.queue}}}};
}

// The scores, computed in a thread of the scorer; the caller goes on in its own strand.
net::awaitable<std::vector<float>> Server::scored(Job job) {
  struct Outcome {
    std::vector<float> scores;
    std::exception_ptr error;
  };
  const auto executor = co_await net::this_coro::executor;
  auto outcome = std::make_shared<Outcome>();
  net::steady_timer done(executor, Clock::time_point::max());
  auto ready = std::make_shared<bool>(false);
  job.done = [outcome, ready, executor, &done](std::vector<float> scores, std::exception_ptr error) {
    outcome->scores = std::move(scores), outcome->error = error;
    net::post(executor, [ready, &done] { *ready = true, done.cancel(); });
  };
  scorer_->submit(std::move(job));
  while (!*ready) {
    boost::system::error_code cancelled;
    co_await done.async_wait(net::redirect_error(net::use_awaitable, cancelled));
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  co_return std::move(outcome->scores);
}

Server::Asked Server::read(const Request& request, Clock::time_point begin) const {
  Asked asked;
  asked.model = versions_.take();  // one version from the request's beginning to its end
  asked.place = v2_path(path_of(request));
  const auto& [model, place] = std::tie(asked.model, asked.place);
  if (place && !place->version.empty() && place->version != model->version())
    throw Refused(404, "version '" + place->version + "' does not answer; " + model->version() + " does");
  const std::string_view deadline = view(request["X-Deadline-Ms"]);
  std::optional<Clock::time_point> until;
  if (!deadline.empty()) {
    double ms = 0;
    const auto [end, error] = std::from_chars(deadline.data(), deadline.data() + deadline.size(), ms);
    if (error != std::errc() || end != deadline.data() + deadline.size() || !(ms > 0 && ms < 1e9))
      throw Refused(400, "X-Deadline-Ms: give milliseconds, from the request's arrival to its answer");
    until = begin + std::chrono::microseconds(static_cast<int64_t>(ms * 1e3));
  }
  InferRequest& infer = asked.infer;
  if (place) {
    infer = read_tensors(request.body(), view(request[kJsonBytes]), model->mapping(), options_.limits);
  } else {
    const std::string_view kind = view(request[http::field::content_type]);
    if (!kind.empty() && !kind.starts_with(kJson)) throw Refused(415, "send application/json");
    infer.body = read_rows(request.body(), model->mapping().columns(), options_.limits);
  }
  for (const auto& [name, binary] : infer.outputs)
    if (std::find(model->labels().begin(), model->labels().end(), name) == model->labels().end())
      throw Refused(422, "the model has no output '" + name + "'; GET /v2/models/NAME lists them");
  asked.job = {model, model->mapping().map(infer.body), until, nullptr};
  asked.rows = static_cast<size_t>(asked.job.mapped.rows);
  if (asked.job.mapped.ids > options_.limits.ids)
    throw Refused(413, std::to_string(asked.job.mapped.ids) + " ids are more than the " + std::to_string(options_.limits.ids) +
                           " of a request; send shorter lists, fewer rows");
  return asked;
}

Response Server::written(const Asked& asked, const std::vector<float>& scores, const std::string& id) const {
  const auto& [model, place, infer, job, rows] = asked;
  const std::vector<std::string>& labels = model->labels();
  std::string text, bytes;
  auto numbers = [&](size_t label) {
    text += '[';
    for (size_t row = 0; row < rows; ++row) {
      if (row) text += ',';
      write_number(text, scores[row * labels.size() + label]);
    }
    text += ']';
  };
  Response made = reply(http::status::ok, "");
  if (!place) {
    text = "{\"model\":" + text_of(options_.name) + ",\"version\":" + text_of(model->version()) + ",\"scores\":{";
    for (size_t label = 0; label < labels.size(); ++label) {
      text += (label ? "," : "") + text_of(labels[label]) + ':';
      numbers(label);
    }
    text += "}}";
  } else {
    text = "{\"model_name\":" + text_of(options_.name) + ",\"model_version\":" + text_of(model->version()) + ",\"id\":" + text_of(infer.id.empty() ? id : infer.id) + ",\"outputs\":[";
    bool first = true;
    for (size_t label = 0; label < labels.size(); ++label) {
      const auto wanted = std::find_if(infer.outputs.begin(), infer.outputs.end(), [&](const auto& one) { return one.first == labels[label]; });
      if (!infer.outputs.empty() && wanted == infer.outputs.end()) continue;
      text += std::string(first ? "" : ",") + "{\"name\":" + text_of(labels[label]) + ",\"datatype\":\"FP32\",\"shape\":[" + std::to_string(rows) + "],";
      first = false;
      if (wanted == infer.outputs.end() ? infer.binary : wanted->second) {
        text += "\"parameters\":{\"binary_data_size\":" + std::to_string(rows * sizeof(float)) + "}}";
        for (size_t row = 0; row < rows; ++row) bytes.append(reinterpret_cast<const char*>(&scores[row * labels.size() + label]), sizeof(float));
      } else {
        text += "\"data\":";
        numbers(label);
        text += '}';
      }
    }
    text += "]}";
    if (!bytes.empty()) {
      made.set(kJsonBytes, std::to_string(text.size()));
      made.set(http::field::content_type, "application/octet-stream");
    }
  }
  made.body() = text + bytes;
  return made;
}

// The answer to what is not scored; none of what is, once it is known to be allowed.
std::optional<Response> Server::unscored(const Request& request) {
  const std::string_view path = path_of(request);
  const auto model = versions_.take();
  if (path == "/healthz")
    return reply(http::status::ok, text_of({{"status", stopping_ ? "stopping" : "ok"}, {"models", {{{"name", options_.name}, {"version", model->version()}, {"refused", versions_.refused()}}}}}));
  if (path == "/v2/health/live" || path == "/v2/health/ready") return reply(http::status::ok, "");
  const std::optional<Path> place = v2_path(path);
  const bool scores = path == "/score" || path == "/score/" + options_.name || (place && place->verb == "infer");
  clients_.admit(view(request[http::field::authorization]), scores);
  if (place && place->model != options_.name) throw Refused(404, "there is no model '" + place->model + "'; there is " + options_.name);
  if (scores) {
    if (request.method() != http::verb::post) throw Refused(405, "send the rows with POST");
    if (const std::string_view coding = view(request[http::field::content_encoding]); !coding.empty() && coding != "identity")
      throw Refused(415, "content encoding: send the body as it is");
    return std::nullopt;
  }
  if (path == "/metrics") return reply(http::status::ok, metrics_.text(options_.name, model->version()), "text/plain; version=0.0.4");
  if (path == "/schema" || path == "/schema/" + options_.name) return reply(http::status::ok, text_of(schema()));
  if (path == "/v2") return reply(http::status::ok, text_of({{"name", "rayrec"}, {"version", "cpp"}, {"extensions", {"binary_tensor_data"}}}));
  if (place && place->verb == "ready") return reply(http::status::ok, text_of({{"name", options_.name}, {"ready", true}}));
  if (place) {
    json outputs = json::array();
    for (const std::string& label : model->labels()) outputs.push_back({{"name", label}, {"datatype", "FP32"}, {"shape", {-1}}});
    return reply(http::status::ok, text_of({{"name", options_.name}, {"versions", {model->version()}}, {"platform", "rayrec"}, {"inputs", inputs_of(model->mapping())}, {"outputs", outputs}}));
  }
  throw Refused(404, "there are POST /score, GET /schema, /healthz, /metrics and /v2");
}

// gcc 12 destroys the initializer lists of a coroutine twice: it only calls, others make the answers.
net::awaitable<Response> Server::answer(const Request& request, const std::string& id, Clock::time_point begin) {
  std::optional<Response> plain = unscored(request);
  if (plain) co_return std::move(*plain);
  Asked asked = read(request, begin);
  metrics_.ids(asked.model->mapping(), asked.job.mapped);
  const std::vector<float> scores = co_await scored(std::move(asked.job));
  Response made = written(asked, scores, id);
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  made.set("Server-Timing", "score;dur=" + std::to_string(seconds * 1e3));
  metrics_.scored(asked.model->version(), asked.rows, seconds);
  co_return made;
}

Refused Server::too_long() const {
  return Refused(413, "the body has more than the " + std::to_string(options_.limits.body_bytes) + " bytes of a request; send fewer rows");
}

net::awaitable<void> Server::session(tcp::socket socket) {
  socket.set_option(tcp::no_delay(true));
  const auto executor = co_await net::this_coro::executor;
  Stream stream(std::move(socket));
  Session own{&stream};
  {
    const std::lock_guard lock(turn_);
    sessions_.insert(&own);
  }
  beast::flat_buffer buffer(kMaxHead + options_.limits.body_bytes);
  for (bool going = true; going && !stopping_;) {
    http::request_parser<http::string_body> parser;
    parser.header_limit(kMaxHead);
    parser.body_limit(options_.limits.body_bytes);
    boost::system::error_code error;
    own.idle = true;
    stream.expires_after(std::chrono::milliseconds(static_cast<int64_t>(options_.idle_s * 1e3)));
    co_await http::async_read_header(stream, buffer, parser, net::redirect_error(net::use_awaitable, error));
    const bool malformed = error && error.category() == http::make_error_code(http::error::bad_method).category() && error != http::error::end_of_stream;
    if (error && !malformed) break;
    own.idle = false;
    stream.expires_never();
    const auto begin = Clock::now();
    const std::string id = request_id(view(parser.get()[kRequestId]));
    std::optional<Response> made;
    bool whole = false;
    try {
      if (error == http::error::body_limit) throw too_long();  // by its head
      if (malformed) throw Refused(error == http::error::header_limit ? 431 : 400, "the request is no HTTP: " + error.message());
      if (parser.get().method() == http::verb::post) scorer_->check_queue();  // before the body is read
      if (parser.get()[http::field::expect] == "100-continue") {
        http::response<http::empty_body> go{http::status::continue_, 11};
        co_await http::async_write(stream, go, net::redirect_error(net::use_awaitable, error));
        if (error) break;
      }
      // Not the stream's own time-out, which closes it: the client is told.
      bool late = false;
      auto timer = std::make_shared<net::steady_timer>(executor, std::chrono::milliseconds(static_cast<int64_t>(options_.limits.body_s * 1e3)));
      auto reading = std::make_shared<bool>(true);
      timer->async_wait([&late, &stream, reading](boost::system::error_code ended) {
        if (!ended && *reading) late = true, stream.cancel();
      });
      co_await http::async_read(stream, buffer, parser, net::redirect_error(net::use_awaitable, error));
      *reading = false;
      timer->cancel();
      if (late) throw Refused(408, "the body was not there in time");
      if (error == http::error::body_limit) throw too_long();
      if (error && error.category() == http::make_error_code(http::error::bad_method).category()) throw Refused(400, "the request is no HTTP: " + error.message());
      if (error) break;
      whole = true;
      made = co_await answer(parser.get(), id, begin);
    } catch (const Refused& refused) {
      made = refusal(refused);
    } catch (const std::exception& failed) {
      std::cerr << "request " << id << " failed: " << failed.what() << std::endl;
      made = refusal(Refused(500, "the request could not be answered; the server's log says why"));
    }
    const std::string_view path = view(parser.get().target());
    if (path.starts_with("/score") || path.ends_with("/infer")) metrics_.request(static_cast<int>(made->result_int()));
    made->set(kRequestId, id);
    made->version(11);
    going = whole && parser.get().keep_alive() && !stopping_;
    made->keep_alive(going);
    made->prepare_payload();
    if (parser.get().method() == http::verb::head) made->body().clear();
    stream.expires_after(std::chrono::seconds(30));
    co_await http::async_write(stream, *made, net::redirect_error(net::use_awaitable, error));
    if (error) break;
    if (!whole) {  // a client that still sends gets the answer before the connection ends
      stream.socket().shutdown(tcp::socket::shutdown_send, error);
      stream.expires_after(std::chrono::seconds(1));
      char room[4096];
      for (size_t got = 1; got && !error;) got = co_await stream.async_read_some(net::buffer(room), net::redirect_error(net::use_awaitable, error));
    }
  }
  {
    const std::lock_guard lock(turn_);
    sessions_.erase(&own);
  }
}

net::awaitable<void> Server::accept(tcp::acceptor& acceptor) {
  while (!stopping_) {
    boost::system::error_code error;
    const auto strand = net::make_strand(io_);
    tcp::socket socket = co_await acceptor.async_accept(strand, net::redirect_error(net::use_awaitable, error));
    if (error) {
      if (stopping_) co_return;
      net::steady_timer pause(acceptor.get_executor(), std::chrono::milliseconds(50));  // no file descriptor is left
      co_await pause.async_wait(net::redirect_error(net::use_awaitable, error));
      continue;
    }
    size_t open;
    {
      const std::lock_guard lock(turn_);
      open = sessions_.size();
    }
    if (open < options_.connections) net::co_spawn(strand, session(std::move(socket)), net::detached);
  }
}

// No new request; connections that wait for one end.
void Server::stop(tcp::acceptor& acceptor) {
  stopping_ = true;
  acceptor.close();
  const std::lock_guard lock(turn_);
  for (Session* one : sessions_)
    net::post(one->stream->get_executor(), [this, one] {
      const std::lock_guard inner(turn_);
      if (sessions_.contains(one) && one->idle) one->stream->cancel();
    });
}

int Server::run() {
  scorer_.emplace(options_.threads, options_.cores, options_.limits, metrics_);
  tcp::acceptor acceptor(io_);
  try {
    const tcp::endpoint address(net::ip::make_address(options_.host), options_.port);
    acceptor.open(address.protocol());
    acceptor.set_option(net::socket_base::reuse_address(true));
    acceptor.bind(address);
    acceptor.listen(1024);
  } catch (const std::exception& error) {
    std::cerr << options_.host << ":" << options_.port << " cannot be listened on: " << error.what() << std::endl;
    return 1;
  }
  net::signal_set signals(io_, SIGTERM, SIGINT);
  net::steady_timer last(io_);
  signals.async_wait([&](boost::system::error_code error, int) {
    if (error) return;
    std::cerr << "stopping" << std::endl;
    stop(acceptor);
    last.expires_after(std::chrono::milliseconds(static_cast<int64_t>(options_.stop_s * 1e3)));
    last.async_wait([](boost::system::error_code cancelled) {
      if (cancelled) return;
      std::cerr << "requests are not answered in time: they are given up" << std::endl;
      std::_Exit(1);
    });
    net::co_spawn(io_, [this, &last]() -> net::awaitable<void> {
      for (net::steady_timer pause(io_);;) {
        pause.expires_after(std::chrono::milliseconds(5));
        co_await pause.async_wait(net::use_awaitable);
        const std::lock_guard lock(turn_);
        if (sessions_.empty()) break;
      }
      last.cancel();
    }, net::detached);
  });
  std::atomic<bool> ended = false;
  std::thread watch([&] { versions_.watch(ended, [&](bool took_over) { metrics_.version(took_over); }); });
  net::co_spawn(io_, accept(acceptor), net::detached);
  std::cerr << "serving " << versions_.take()->version() << " at http://" << options_.host << ":" << options_.port << std::endl;
  std::thread second([this] { io_.run(); });
  io_.run();
  second.join();
  ended = true;
  watch.join();
  scorer_.reset();
  return 0;
}

}  // namespace

int serve(const Options& options) {
  try {
    return Server(options).run();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}

}  // namespace rayrec
