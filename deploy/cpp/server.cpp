// rayrec_server [NAME=]PATH [options]: scores raw rows over HTTP with an export, or the newest of a folder of exports.
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>

#include "http.h"

namespace {

constexpr const char* kUsage =
    "rayrec_server [NAME=]PATH: scores raw rows over HTTP\n"
    "  --host 127.0.0.1      address; another than this machine's needs --token-file\n"
    "  --port 8100\n"
    "  --threads 1           requests, or batches of them, that are scored at a time\n"
    "  --cores 1             that each of these computes on\n"
    "  --token-file FILE     a client's token; may be given several times\n"
    "  --requests-per-s 0    of each client; 0: any number\n"
    "  --rows 10000          of a request; --ids 2000000: of all its lists\n"
    "  --body-bytes 8388608  of a request\n"
    "  --body-s 10           until its body must be there\n"
    "  --queue 128           requests that wait or are scored\n"
    "  --batch-ms 20         that several requests scored together are planned to take at most\n"
    "  --connections 1024    that are open at once\n"
    "  --look-ms 500         between two looks for newer versions\n"
    "  --stop-s 30           after SIGTERM, until requests that are not answered are given up";

bool loopback(const std::string& host) { return host.starts_with("127.") || host == "::1"; }

}  // namespace

int main(int count, char** arguments) {
  rayrec::Options options;
  rayrec::Limits& limits = options.limits;
  auto whole = [](auto& to) { return [&to](const char* text) { to = static_cast<std::decay_t<decltype(to)>>(std::strtoll(text, nullptr, 10)); }; };
  auto real = [](double& to) { return [&to](const char* text) { to = std::strtod(text, nullptr); }; };
  const std::map<std::string, std::function<void(const char*)>> known{
      {"--host", [&](const char* text) { options.host = text; }},
      {"--port", whole(options.port)},
      {"--threads", whole(options.threads)},
      {"--cores", whole(options.cores)},
      {"--token-file", [&](const char* text) { options.token_files.emplace_back(text); }},
      {"--requests-per-s", real(options.requests_per_s)},
      {"--rows", whole(limits.rows)},
      {"--ids", whole(limits.ids)},
      {"--body-bytes", whole(limits.body_bytes)},
      {"--body-s", real(limits.body_s)},
      {"--queue", whole(limits.queue)},
      {"--batch-ms", real(limits.batch_ms)},
      {"--connections", whole(options.connections)},
      {"--look-ms", whole(options.look_ms)},
      {"--stop-s", real(options.stop_s)},
  };
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto found = known.find(word);
    if (found != known.end() && i + 1 < count) {
      found->second(arguments[++i]);
    } else if (word.starts_with("-") || !options.path.empty()) {
      std::cerr << kUsage << std::endl;
      return 2;
    } else {
      const size_t equals = word.find('=');
      if (equals != std::string::npos) options.name = word.substr(0, equals);
      options.path = equals == std::string::npos ? word : word.substr(equals + 1);
    }
  }
  if (options.path.empty() || options.port < 1 || options.threads < 1 || options.cores < 1 || options.look_ms < 1 || limits.queue < 1) {
    std::cerr << kUsage << std::endl;
    return 2;
  }
  if (!loopback(options.host) && options.token_files.empty()) {
    std::cerr << "--host " << options.host << " is open to the network: give --token-file" << std::endl;
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  return rayrec::serve(options);
}
