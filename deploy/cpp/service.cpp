#include "service.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iostream>
#include <sstream>

#include <nlohmann/json.hpp>

namespace rayrec {
namespace {

const std::vector<double> kSeconds{0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0};
const std::vector<double> kTogether{1, 2, 4, 8, 16, 32, 64};
constexpr double kEnough = 0.1;  // a call's own cost below this share of a batch's is not worth a larger batch

// How long it takes says nothing of where two texts differ.
bool equal(std::string_view one, std::string_view other) {
  unsigned char differ = one.size() != other.size();
  for (size_t i = 0; i < one.size(); ++i) differ |= static_cast<unsigned char>(one[i] ^ other[i % std::max<size_t>(1, other.size())]);
  return differ == 0;
}

std::string quoted(const std::string& label) { return nlohmann::json(label).dump(); }

void write(std::ostream& out, const std::string& name, const std::string& labels, const std::vector<double>& edges,
           const std::vector<uint64_t>& counts, double sum) {
  uint64_t below = 0;
  for (size_t i = 0; i <= edges.size(); ++i) {
    below += counts.empty() ? 0 : counts[i];
    out << name << "_bucket{" << labels << ",le=\"";
    if (i < edges.size()) out << edges[i];
    else out << "+Inf";
    out << "\"} " << below << '\n';
  }
  out << name << "_sum{" << labels << "} " << sum << '\n' << name << "_count{" << labels << "} " << below << '\n';
}

}  // namespace

Clients::Clients(const std::vector<std::string>& files, double requests_per_s) : per_s_(requests_per_s) {
  for (const std::string& path : files) {
    std::ifstream file(path);
    std::string token, more;
    if (!(file >> token) || file >> more) throw std::runtime_error("--token-file " + path + " must hold one word; write a long random one into it");
    clients_.push_back({token, std::max(requests_per_s, 1.0), Clock::now()});
  }
}

void Clients::admit(std::string_view authorization, bool scores) {
  if (clients_.empty()) return;
  constexpr std::string_view bearer = "Bearer ";
  Client* found = nullptr;
  if (authorization.starts_with(bearer))
    for (Client& one : clients_)
      if (equal(one.token, authorization.substr(bearer.size()))) found = &one;
  if (found == nullptr) throw Refused(401, "send the service's token as `Authorization: Bearer TOKEN`");
  if (!scores || per_s_ <= 0) return;
  const std::lock_guard lock(turn_);
  const auto now = Clock::now();
  const double most = std::max(per_s_, 1.0);
  found->left = std::min(found->left + std::chrono::duration<double>(now - found->at).count() * per_s_, most);
  found->at = now;
  if (found->left < 1) throw Refused(429, "the client asks too often: ask again later");
  found->left -= 1;
}

void Metrics::Histogram::observe(const std::vector<double>& edges, double value) {
  counts.resize(edges.size() + 1);
  ++counts[static_cast<size_t>(std::lower_bound(edges.begin(), edges.end(), value) - edges.begin())];
  sum += value;
}

void Metrics::request(int status) {
  const std::lock_guard lock(turn_);
  ++requests_[status];
}

void Metrics::scored(const std::string& version, size_t rows, double seconds) {
  const std::lock_guard lock(turn_);
  versions_[version].seconds.observe(kSeconds, seconds);
  versions_[version].rows += rows;
}

void Metrics::together(size_t requests) {
  const std::lock_guard lock(turn_);
  together_.observe(kTogether, static_cast<double>(requests));
}

void Metrics::version(bool took_over) {
  const std::lock_guard lock(turn_);
  ++(took_over ? took_over_ : refused_);
}

void Metrics::ids(const Mapping& mapping, const Mapped& mapped) {
  for (size_t i = 0; i < mapping.sparse().size(); ++i) {
    const SparseFeature& feature = mapping.sparse()[i];
    if (!feature.vocabulary) continue;
    const auto unknown = std::count_if(mapped.sparse[i].ids.begin(), mapped.sparse[i].ids.end(),
                                       [&](int64_t id) { return id < static_cast<int64_t>(feature.oov_rows); });
    const std::lock_guard lock(turn_);
    ids_[feature.name].first += mapped.sparse[i].ids.size();
    ids_[feature.name].second += static_cast<uint64_t>(unknown);
  }
}

std::string Metrics::text(const std::string& model, const std::string& active) {
  const std::lock_guard lock(turn_);
  std::ostringstream out;
  const std::string of = "model=" + quoted(model);
  auto type = [&](const std::string& name, const char* kind, const char* help) {
    out << "# HELP " << name << ' ' << help << "\n# TYPE " << name << ' ' << kind << '\n';
  };
  type("rayrec_requests_total", "counter", "requests by HTTP status");
  for (const auto& [status, count] : requests_) out << "rayrec_requests_total{" << of << ",status=\"" << status << "\"} " << count << '\n';
  type("rayrec_request_seconds", "histogram", "time of a request");
  for (const auto& [version, one] : versions_)
    write(out, "rayrec_request_seconds", of + ",version=" + quoted(version), kSeconds, one.seconds.counts, one.seconds.sum);
  type("rayrec_rows_total", "counter", "rows that were scored");
  for (const auto& [version, one] : versions_) out << "rayrec_rows_total{" << of << ",version=" << quoted(version) << "} " << one.rows << '\n';
  type("rayrec_batch_requests", "histogram", "requests scored together");
  write(out, "rayrec_batch_requests", of, kTogether, together_.counts, together_.sum);
  type("rayrec_ids_total", "counter", "ids of features with a vocabulary");
  for (const auto& [name, counts] : ids_) out << "rayrec_ids_total{" << of << ",feature=" << quoted(name) << "} " << counts.first << '\n';
  type("rayrec_unknown_ids_total", "counter", "those outside the vocabulary");
  for (const auto& [name, counts] : ids_) out << "rayrec_unknown_ids_total{" << of << ",feature=" << quoted(name) << "} " << counts.second << '\n';
  type("rayrec_versions_total", "counter", "versions by what became of them");
  out << "rayrec_versions_total{" << of << ",outcome=\"serving\"} " << took_over_ << '\n'
      << "rayrec_versions_total{" << of << ",outcome=\"refused\"} " << refused_ << '\n';
  std::erase_if(versions_, [&](const auto& one) { return one.first != active; });
  return out.str();
}

Scorer::Scorer(size_t threads, int cores, const Limits& limits, Metrics& metrics) : limits_(limits), metrics_(metrics) {
  for (size_t i = 0; i < threads; ++i)
    threads_.emplace_back([this, cores] {
      use_cores(cores);
      run();
    });
}

Scorer::~Scorer() {
  {
    const std::lock_guard lock(turn_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& one : threads_) one.join();
}

void Scorer::check_queue() const {
  const std::lock_guard lock(turn_);
  if (inside_ >= limits_.queue) throw Refused(503, std::to_string(inside_) + " requests wait or are scored: ask again later");
}

void Scorer::submit(Job job) {
  {
    const std::lock_guard lock(turn_);
    if (inside_ >= limits_.queue) throw Refused(503, std::to_string(inside_) + " requests wait or are scored: ask again later");
    ++inside_;
    waiting_.push_back(std::move(job));
  }
  changed_.notify_one();
}

void Scorer::run() {
  for (;;) {
    std::vector<Job> jobs = next();
    if (jobs.empty()) return;
    score(jobs);
    const std::lock_guard lock(turn_);
    inside_ -= jobs.size();
  }
}

double Scorer::most_rows(const Pace& pace) const {
  const double worth = pace.call_ms * (1 - kEnough) / (kEnough * pace.row_ms);
  return std::min(worth, limits_.batch_ms / pace.row_ms);
}

// Those that wait, of one version, as many as are worth it and are scored in the planned time; at least one.
std::vector<Job> Scorer::next() {
  std::unique_lock lock(turn_);
  changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
  std::vector<Job> jobs;
  double rows = 0;
  size_t ids = 0;
  while (!waiting_.empty()) {
    Job& one = waiting_.front();
    rows += static_cast<double>(one.mapped.rows), ids += one.mapped.ids;
    if (!jobs.empty() && (one.model != jobs[0].model || rows > most_rows(one.model->pace) || ids > limits_.ids)) break;
    jobs.push_back(std::move(one));
    waiting_.pop_front();
  }
  if (!waiting_.empty()) changed_.notify_one();
  return jobs;
}

void Scorer::score(std::vector<Job>& jobs) {
  const auto late = [](const Job& job) { return job.deadline && Clock::now() > *job.deadline; };
  const auto refuse = [](Job& job) {
    job.done({}, std::make_exception_ptr(Refused(504, "not scored within the X-Deadline-Ms of the request; it was given up")));
    job.done = nullptr;
  };
  std::vector<const Mapped*> parts;
  for (Job& job : jobs) {
    if (late(job)) refuse(job);
    else parts.push_back(&job.mapped);
  }
  if (parts.empty()) return;
  std::vector<float> scores;
  std::exception_ptr failed;
  try {
    scores = jobs[0].model->score(parts);
  } catch (const std::exception& error) {
    std::cerr << "scoring failed: " << error.what() << std::endl;
    failed = std::current_exception();
  }
  metrics_.together(parts.size());
  size_t at = 0;
  for (Job& job : jobs) {
    if (!job.done) continue;
    const size_t count = static_cast<size_t>(job.mapped.rows) * job.model->labels().size();
    if (failed) job.done({}, failed);
    else if (late(job)) refuse(job);
    else job.done({scores.begin() + static_cast<std::ptrdiff_t>(at), scores.begin() + static_cast<std::ptrdiff_t>(at + count)}, nullptr);
    at += count;
  }
}

}  // namespace rayrec
