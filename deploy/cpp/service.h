// What answers requests, whatever the protocol: who may ask, requests scored together, figures.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "model.h"

namespace rayrec {

using Clock = std::chrono::steady_clock;

// Those whose tokens are known, from files with one word each; with none, everyone may ask.
class Clients {
 public:
  // `requests_per_s`: of each client; 0: any number. Throws std::runtime_error where a file holds no token.
  Clients(const std::vector<std::string>& files, double requests_per_s);

  // Throws Refused: 401, or 429 where the client asks too often.
  void admit(std::string_view authorization, bool scores);

 private:
  struct Client {
    std::string token;
    double left;
    Clock::time_point at;
  };
  std::vector<Client> clients_;
  const double per_s_;
  std::mutex turn_;
};

// Counters and histograms in Prometheus' text format. Series are of outcomes and of versions that answer: a version that
// no longer answers is in it once more, then it goes.
class Metrics {
 public:
  void request(int status);
  void scored(const std::string& version, size_t rows, double seconds);
  void together(size_t requests);
  void version(bool took_over);
  void ids(const Mapping& mapping, const Mapped& mapped);
  std::string text(const std::string& model, const std::string& active);

 private:
  struct Histogram {
    std::vector<uint64_t> counts;
    double sum = 0;
    void observe(const std::vector<double>& edges, double value);
  };
  struct OfVersion {
    Histogram seconds;
    uint64_t rows = 0;
  };
  std::mutex turn_;
  std::map<int, uint64_t> requests_;
  std::map<std::string, OfVersion> versions_;
  std::map<std::string, std::pair<uint64_t, uint64_t>> ids_;  // of features with a vocabulary: all, and unknown ones
  Histogram together_;
  uint64_t took_over_ = 0, refused_ = 0;
};

// A request that is scored; `done` is called once, in a thread of the scorer.
struct Job {
  std::shared_ptr<const Model> model;
  Mapped mapped;
  std::optional<Clock::time_point> deadline;
  std::function<void(std::vector<float> scores, std::exception_ptr error)> done;
};

// Requests that wait while others are scored are scored together, until a call's own cost is a small share: more rows
// would only make the first wait for the last. A request never waits for others to come.
class Scorer {
 public:
  // `cores` that each of `threads` computes on.
  Scorer(size_t threads, int cores, const Limits& limits, Metrics& metrics);
  ~Scorer();  // after all that wait are answered

  // Throws Refused, 503, where too many wait or are scored.
  void check_queue() const;
  void submit(Job job);

 private:
  void run();
  double most_rows(const Pace& pace) const;
  std::vector<Job> next();
  void score(std::vector<Job>& jobs);

  const Limits& limits_;
  Metrics& metrics_;
  mutable std::mutex turn_;
  std::condition_variable changed_;
  std::deque<Job> waiting_;
  size_t inside_ = 0;  // waiting or being scored
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rayrec
