#include "model.h"

#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include "mapped_file.h"

namespace rayrec {
namespace {

using nlohmann::json;

constexpr int kOldestFormat = 1, kNewestFormat = 4;  // of export.json

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ExportError(path + " is missing from the export, or the export is from an older rayrec: run `rayrec export` again");
  try {
    return json::parse(file);
  } catch (const json::exception& error) {
    throw ExportError(path + ": " + error.what() + "; export the run again");
  }
}

json read_index(const std::string& folder) {
  json index = read_json(folder + "/export.json");
  const auto format = index.is_object() ? index.find("format") : index.end();
  if (format == index.end() || !format->is_number() || *format < kOldestFormat || *format > kNewestFormat)
    throw ExportError(folder + "/export.json has a format that this build does not read; export the run again");
  return index;
}

// Instruction set flags of this machine's processor.
std::set<std::string> processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

// Checks that the graph was compiled by this torch and for this processor: a wrong one can crash the process.
void check_compiled(const std::string& folder, const json& index) {
  const std::string torch = index.at("versions").at("torch");
  if (torch.substr(0, torch.find('+')) != TORCH_VERSION)
    throw ExportError(folder + " was compiled with torch " + torch + ", this library with " TORCH_VERSION
                      ": export with that torch, or build the library again");
  if (index.value("march", json()).is_null())
    throw ExportError(folder + " was compiled by an older rayrec, which did not record the processor: export the run again");
  const std::set<std::string> flags = processor_flags();
  std::string missing;
  for (const std::string flag : index["instructions"])
    if (!flags.contains(flag)) missing += " " + flag;
  if (!missing.empty())
    throw ExportError(folder + " was compiled for " + index.value("march", json("other")).dump() + " processors; this one lacks" + missing +
                      ": export it for this machine");
}

// Rows as the graph reads them: bags of all keys, key after key.
struct Inputs {
  std::vector<float> dense, weights;
  std::vector<int64_t> offsets, ids;
};

}  // namespace

struct Model::State {
  explicit State(const std::string& folder) : mapping(folder) {}

  Mapping mapping;
  std::string version;
  std::vector<std::string> labels;
  std::vector<size_t> features;    // index of each key of the graph in the mapping's features
  std::vector<uint8_t> shared;     // keys whose context the graph reads once for all rows
  std::vector<int64_t> num_rows;   // rows of each key's table
  int64_t num_dense = 0;
  bool weighted = false;
  size_t query_dim = 0;  // 0: the graph returns logits
  bool has_context = false;  // the graph reads a row of bags before the others, which belongs to all of them
  std::unique_ptr<MappedFile> tables;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;

  void check(const std::string& folder) const {
    if (num_dense != mapping.num_dense() || weighted != mapping.weighted() || features.size() != mapping.sparse().size())
      throw ExportError(folder + ": mapping.json has other features than the graph; export the run again");
  }

  Inputs inputs_of(const Mapped& mapped) const {
    const size_t rows = static_cast<size_t>(mapped.rows);
    Inputs inputs;
    inputs.dense.resize(rows * static_cast<size_t>(num_dense));
    float* to = inputs.dense.data();
    for (size_t row = 0; row < rows; ++row)
      for (size_t i = 0; i < mapped.dense.size(); ++i) {
        const size_t width = mapping.dense()[i].width;
        const float* from = mapped.dense[i].values.data() + (mapped.dense[i].shared ? 0 : row * width);
        to = std::copy(from, from + width, to);
      }
    inputs.offsets.reserve(features.size() * (rows + 1) + 1);
    inputs.offsets.push_back(0);
    auto add = [&](const Bags& bags, size_t bag) {
      const auto first = bags.offsets[bag], last = bags.offsets[bag + 1];
      inputs.ids.insert(inputs.ids.end(), bags.ids.begin() + first, bags.ids.begin() + last);
      if (!weighted) return;
      if (bags.weights.empty()) inputs.weights.resize(inputs.ids.size(), 1.0f);
      else inputs.weights.insert(inputs.weights.end(), bags.weights.begin() + first, bags.weights.begin() + last);
    };
    auto close = [&] { inputs.offsets.push_back(static_cast<int64_t>(inputs.ids.size())); };
    for (size_t key = 0; key < features.size(); ++key) {
      const size_t first_id = inputs.ids.size();
      const Bags& bags = mapped.sparse[features[key]];
      const bool once = has_context && shared[key] && bags.shared;
      if (has_context) {
        if (once) add(bags, 0);
        close();
      }
      for (size_t row = 0; row < rows; ++row) {
        if (!once) add(bags, bags.shared ? 0 : row);
        close();
      }
      // The kernel does not check ids: it would read memory outside the table.
      for (size_t i = first_id; i < inputs.ids.size(); ++i)
        if (inputs.ids[i] < 0 || inputs.ids[i] >= num_rows[key]) throw std::logic_error("an id is outside its table");
    }
    return inputs;
  }
};

void set_threads(int count) { at::set_num_threads(count); }

Model::Model(const std::string& folder, size_t runners) {
  json index = read_index(folder);
  try {
    check_compiled(folder, index);
    const auto& targets = index.at("targets");
    if (std::find(targets.begin(), targets.end(), "aoti") == targets.end())
      throw ExportError(folder + " has no compiled graph: export with --target aoti");
    for (const auto& [name, file] : index.at("files").items()) {
      if (name.find("..") != std::string::npos || name.starts_with("/"))
        throw ExportError(folder + "/export.json names a file outside the folder");
      const std::string path = folder + "/" + name;
      MappedFile data(path);
      if (data.size() != file.at(0).get<size_t>())
        throw ExportError(path + " has the wrong size: copy it again");
      if (crc32_z(0, static_cast<const Bytef*>(data.data()), data.size()) != file.at(1).get<uint64_t>())
        throw ExportError(path + " is damaged (wrong checksum): copy it again");
    }
    const json parity = read_json(folder + "/parity.json");
    if (!parity.is_object() || parity.value("within_limits", json()) != json(true))
      throw ExportError(folder + ": its scores are outside their limits, or were not compared; export the run again");
    state_ = std::make_unique<State>(folder);
    const json& inputs = index.at("inputs");
    const std::vector<SparseFeature>& features = state_->mapping.sparse();
    const json context = inputs.value("context", json());
    state_->has_context = !context.is_null();
    for (const std::string key : inputs.at("keys")) {
      const auto feature = std::find_if(features.begin(), features.end(), [&](const SparseFeature& known) { return known.name == key; });
      if (feature == features.end()) throw ExportError(folder + ": mapping.json lacks feature " + key + "; export the run again");
      state_->features.push_back(static_cast<size_t>(feature - features.begin()));
      state_->num_rows.push_back(index.at("rows_of").at(key).get<int64_t>());
      state_->shared.push_back(state_->has_context && std::find(context.begin(), context.end(), key) != context.end());
    }
    state_->version = index.at("version");
    state_->num_dense = inputs.at("num_dense").get<int64_t>();
    const json kinds = inputs.value("kinds", json());
    if (std::find(kinds.begin(), kinds.end(), "number") != kinds.end())
      throw ExportError(folder + " predicts a number; the C++ library supports probabilities only: use `rayrec serve` or `rayrec predict`");
    const json query = inputs.value("query", json());
    if (!inputs.value("lists", json::array()).empty())
      throw ExportError(folder + " reads times or numbers of histories; the C++ library does not: use `rayrec serve` or `rayrec retrieve`");
    if (!query.is_null()) state_->query_dim = query.at("dim").get<size_t>();
    else state_->labels = inputs.at("labels").is_null() ? std::vector<std::string>{"label"} : inputs.at("labels").get<std::vector<std::string>>();
    state_->weighted = inputs.at("weighted").get<bool>();
    state_->check(folder);
  } catch (const json::exception& error) {
    throw ExportError(folder + "/export.json: " + error.what() + "; export the run again");
  }
  state_->tables = std::make_unique<MappedFile>(folder + "/tables.bin");
  try {
    state_->loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        folder + "/aoti", "model", false, runners, static_cast<c10::DeviceIndex>(-1));
  } catch (const std::exception& error) {
    throw ExportError(folder + "/aoti cannot be loaded by this torch: " + error.what());
  }
  Mapped zeros;
  zeros.rows = 1;
  for (const DenseFeature& feature : mapping().dense()) zeros.dense.push_back({false, std::vector<float>(feature.width)});
  for (const SparseFeature& feature : mapping().sparse())
    zeros.sparse.push_back({false, {0}, {0, 1}, feature.kind == SparseFeature::Kind::Weighted ? std::vector<float>{1} : std::vector<float>()});
  for (float value : score(zeros))
    if (!std::isfinite(value)) throw ExportError(folder + ": the score of a row of zeros is not finite; check its training");
}

Model::~Model() = default;

std::vector<float> Model::score(const Mapped& mapped) const {
  if (mapped.rows == 0) return {};
  Inputs inputs = state_->inputs_of(mapped);
  c10::InferenceMode guard;
  auto view = [](auto& numbers, at::IntArrayRef shape, at::ScalarType kind) { return at::from_blob(numbers.data(), shape, at::TensorOptions(kind)); };
  std::vector<at::Tensor> tensors{
      view(inputs.dense, {mapped.rows, state_->num_dense}, at::kFloat),
      view(inputs.ids, {static_cast<int64_t>(inputs.ids.size())}, at::kLong),
      view(inputs.offsets, {static_cast<int64_t>(inputs.offsets.size())}, at::kLong),
      // torch has no tensor of constant data; it only reads this one
      at::from_blob(state_->tables->data(), {static_cast<int64_t>(state_->tables->size())}, at::TensorOptions(at::kByte)),
  };
  if (state_->weighted) tensors.push_back(view(inputs.weights, {static_cast<int64_t>(inputs.weights.size())}, at::kFloat));
  at::Tensor output = state_->loader->run(tensors)[0];
  at::Tensor scores = (state_->query_dim == 0 ? output.sigmoid() : output).contiguous();
  const float* first = scores.data_ptr<float>();
  return {first, first + scores.numel()};
}

const std::string& Model::version() const { return state_->version; }
const Mapping& Model::mapping() const { return state_->mapping; }
const std::vector<std::string>& Model::labels() const { return state_->labels; }
size_t Model::query_dim() const { return state_->query_dim; }

}  // namespace rayrec
