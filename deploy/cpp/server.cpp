// rayrec_server PATH [--port 8100] [--threads 1] [--look-ms 500]: scores mapped rows over HTTP, on this machine only.
//
//   POST /score    body, little endian: int64 B, int64 n, float32 dense [B, N], int64 offsets [F * B + 1], int64 ids [n],
//                  float32 weights [n] where ids have them; answer: float32 probabilities [B, labels], X-Version,
//                  Server-Timing (ms from the whole body to the whole answer)
//   GET /healthz   the version
//
// PATH is an export or a folder of exports, of which the one named in `current`, else the last by name (v10 is after
// v9), is served. It is looked at every so many milliseconds: a new version is loaded beside the old one, its checksums
// and parity are checked, it scores a row, then it takes over; one that fails is not read again before it changes.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "model.h"

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxBody = 64u << 20, kMaxHead = 16u << 10;

struct Refused : std::runtime_error {
  Refused(int status, const std::string& text) : std::runtime_error(text), status(status) {}
  int status;
};

// Names in order, numbers in them by their value and before text: as the service in Python.
bool before(const std::string& one, const std::string& other) {
  auto digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  size_t i = 0, j = 0;
  while (i < one.size() && j < other.size()) {
    if (digit(one[i]) != digit(other[j])) return digit(one[i]);
    if (!digit(one[i])) {
      if (one[i] != other[j]) return static_cast<unsigned char>(one[i]) < static_cast<unsigned char>(other[j]);
      ++i, ++j;
      continue;
    }
    auto number = [&](const std::string& text, size_t& at) {
      const size_t first = std::min(text.find_first_not_of('0', at), text.size());
      for (at = first; at < text.size() && digit(text[at]);) ++at;
      return text.substr(first, at - first);
    };
    const std::string a = number(one, i), b = number(other, j);
    if (a != b) return a.size() != b.size() ? a.size() < b.size() : a < b;
  }
  return i == one.size() && j == other.size() ? one < other : i == one.size();
}

std::string newest(const fs::path& path) {
  if (fs::exists(path / "export.json")) return fs::canonical(path);
  std::ifstream current(path / "current");
  std::string name;
  if (current >> name) {
    if (name.find('/') != std::string::npos || name == "..")
      throw rayrec::ExportError((path / "current").string() + " must name a folder beside it");
    return fs::canonical(path / name);
  }
  fs::path last;
  for (const auto& entry : fs::directory_iterator(path))
    if (fs::exists(entry.path() / "export.json") && (last.empty() || before(last.filename(), entry.path().filename())))
      last = entry.path();
  if (last.empty()) throw rayrec::ExportError(path.string() + " holds no export");
  return fs::canonical(last);
}

// The parts of a body, one after the other.
class Body {
 public:
  explicit Body(const std::string& data) : data_(data) {}

  template <class T>
  std::span<const T> take(int64_t count, std::vector<T>& room) {
    if (count < 0 || static_cast<uint64_t>(count) > (data_.size() - at_) / sizeof(T))
      throw Refused(400, "the body is shorter than its first two numbers say");
    room.resize(static_cast<size_t>(count));
    std::memcpy(room.data(), data_.data() + at_, room.size() * sizeof(T));  // aligned
    at_ += room.size() * sizeof(T);
    return room;
  }
  bool done() const { return at_ == data_.size(); }

 private:
  const std::string& data_;
  size_t at_ = 0;
};

std::string score(const rayrec::Model& model, const std::string& data) {
  Body body(data);
  std::vector<int64_t> sizes, offsets, ids;
  std::vector<float> dense, weights;
  body.take<int64_t>(2, sizes);
  const int64_t size = sizes[0], count = sizes[1];
  const int64_t most = static_cast<int64_t>(kMaxBody);
  if (size < 0 || size > most || count < 0 || count > most) throw Refused(400, "a size is out of range");
  rayrec::Rows rows;
  rows.size = size;
  rows.dense = body.take<float>(size * model.num_dense(), dense);
  rows.offsets = body.take<int64_t>(model.num_features() * size + 1, offsets);
  rows.ids = body.take<int64_t>(count, ids);
  if (model.weighted()) rows.weights = body.take<float>(count, weights);
  if (!body.done()) throw Refused(400, "the body is longer than its first two numbers say");
  std::vector<float> scores = model.score(rows);
  for (float& value : scores) value = 1.0f / (1.0f + std::exp(-value));
  return {reinterpret_cast<const char*>(scores.data()), scores.size() * sizeof(float)};
}

// One connection, request after request.
class Connection {
 public:
  Connection(int socket, const rayrec::Current& current) : socket_(socket), current_(current) {}
  ~Connection() { ::close(socket_); }

  void serve() {
    std::string method, path;
    size_t length = 0;
    while (read_head(method, path, length)) {
      auto model = current_.take();  // one version from the request's beginning to its end
      int status = 200;
      std::string answer, kind = "application/octet-stream";
      auto begin = std::chrono::steady_clock::now();
      try {
        if (length > kMaxBody) throw Refused(413, "the body is too long");
        std::string body = read(length);
        begin = std::chrono::steady_clock::now();
        if (path == "/healthz") answer = model->version(), kind = "text/plain";
        else if (path != "/score") throw Refused(404, "there are POST /score and GET /healthz");
        else if (method != "POST") throw Refused(405, "send the rows with POST");
        else answer = score(*model, body);
      } catch (const Refused& error) {
        status = error.status, answer = error.what(), kind = "text/plain";
      } catch (const rayrec::BadRows& error) {
        status = 422, answer = error.what(), kind = "text/plain";
      } catch (const std::exception& error) {
        status = 500, answer = "the rows could not be scored", kind = "text/plain";
        std::cerr << error.what() << std::endl;
      }
      std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - begin;
      send("HTTP/1.1 " + std::to_string(status) + " .\r\nContent-Type: " + kind + "\r\nX-Version: " + model->version() +
           "\r\nServer-Timing: score;dur=" + std::to_string(spent.count()) + "\r\nContent-Length: " + std::to_string(answer.size()) + "\r\n\r\n" + answer);
      if (status == 413) return;
    }
  }

 private:
  bool more() {
    char room[65536];
    ssize_t got = ::recv(socket_, room, sizeof room, 0);
    if (got <= 0) return false;
    held_.append(room, static_cast<size_t>(got));
    return true;
  }

  bool read_head(std::string& method, std::string& path, size_t& length) {
    size_t stop;
    while ((stop = held_.find("\r\n\r\n")) == std::string::npos)
      if (held_.size() > kMaxHead || !more()) return false;
    std::string head = held_.substr(0, stop + 2);
    held_.erase(0, stop + 4);
    size_t first = head.find(' '), second = head.find(' ', first + 1);
    if (first == std::string::npos || second == std::string::npos) return false;
    method = head.substr(0, first), path = head.substr(first + 1, second - first - 1), length = 0;
    for (char& letter : head) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    size_t at = head.find("\r\ncontent-length:");
    if (at != std::string::npos) length = std::strtoull(head.c_str() + at + 17, nullptr, 10);
    return true;
  }

  std::string read(size_t length) {
    while (held_.size() < length)
      if (!more()) throw Refused(400, "the connection ended before the body did");
    std::string body = held_.substr(0, length);
    held_.erase(0, length);
    return body;
  }

  void send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      ssize_t now = ::send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (now <= 0) return;
      sent += static_cast<size_t>(now);
    }
  }

  int socket_;
  const rayrec::Current& current_;
  std::string held_;
};

struct Watched {
  fs::path path;
  size_t threads;
  std::chrono::milliseconds pause;
};

// Every file's path, bytes, and time of its last change.
std::string files_of(const fs::path& folder) {
  std::ostringstream found;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file())
      found << entry.path() << ' ' << entry.file_size() << ' ' << entry.last_write_time().time_since_epoch().count() << ' ';
  return found.str();
}

void watch(Watched watched, rayrec::Current& current) {
  std::string told, files, refused;
  for (;;) {
    std::this_thread::sleep_for(watched.pause);
    try {
      files.clear();
      const std::string folder = newest(watched.path);
      if (rayrec::version_of(folder) == current.take()->version()) continue;
      files = files_of(folder);
      if (files == refused) continue;  // reading all of it again would find the same
      current.put(rayrec::load_to_serve(folder, watched.threads));
      told.clear();
      std::cerr << "serving " << current.take()->version() << std::endl;
    } catch (const std::exception& error) {  // the old version answers
      refused = files;
      if (told != error.what()) std::cerr << "refused: " << error.what() << std::endl;
      told = error.what();
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::string path;
  int port = 8100, look_ms = 500;
  size_t threads = 1;
  for (int i = 1; i < count; ++i) {
    std::string word = arguments[i];
    if (word == "--port" && i + 1 < count) port = std::atoi(arguments[++i]);
    else if (word == "--threads" && i + 1 < count) threads = static_cast<size_t>(std::atoi(arguments[++i]));
    else if (word == "--look-ms" && i + 1 < count) look_ms = std::atoi(arguments[++i]);
    else path = word;
  }
  if (path.empty() || port < 1 || port > 65535 || threads < 1 || look_ms < 1) {
    std::cerr << "rayrec_server PATH [--port 8100] [--threads 1] [--look-ms 500]" << std::endl;
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  rayrec::Current current;
  try {
    current.put(rayrec::load_to_serve(newest(path), threads));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || ::listen(listener, 128) != 0) {
    std::cerr << "port " << port << " cannot be listened on: " << std::strerror(errno) << std::endl;
    return 1;
  }
  Watched watched{path, threads, std::chrono::milliseconds(look_ms)};
  std::thread(watch, watched, std::ref(current)).detach();
  std::cerr << "serving " << current.take()->version() << " at http://127.0.0.1:" << port << std::endl;
  for (;;) {
    int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    std::thread([socket, &current] { Connection(socket, current).serve(); }).detach();
  }
}
