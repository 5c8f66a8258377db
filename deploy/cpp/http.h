// The HTTP side: connections, limits, paths. GET /healthz, /metrics, /schema, /v2…; POST /score, /v2/models/NAME/infer.
#pragma once

#include <string>
#include <vector>

#include "service.h"
#include "versions.h"

namespace rayrec {

struct Options {
  std::string name = "model", path, host = "127.0.0.1";
  unsigned short port = 8100;
  size_t threads = 1, connections = 1024;
  int look_ms = 500, cores = 1;
  double idle_s = 60, stop_s = 30, requests_per_s = 0;
  std::vector<std::string> token_files;
  Limits limits;
};

// Serves until SIGTERM or SIGINT; requests that are there by then are answered. Returns the exit status.
int serve(const Options& options);

}  // namespace rayrec
