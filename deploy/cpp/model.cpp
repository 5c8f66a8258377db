#include "model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>

#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include "json.h"

namespace rayrec {
namespace {

constexpr int kOldest = 1, kNewest = 2;  // formats of export.json

// A file's bytes, read only, shared by all processes that map it.
class Mapped {
 public:
  explicit Mapped(const std::string& path) {
    int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (file < 0 || ::fstat(file, &found) != 0) {
      if (file >= 0) ::close(file);
      throw ExportError(path + " cannot be opened");
    }
    size_ = static_cast<size_t>(found.st_size);
    data_ = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0) : nullptr;
    ::close(file);
    if (data_ == MAP_FAILED) throw ExportError(path + " cannot be mapped");
  }
  ~Mapped() {
    if (data_ != nullptr && data_ != MAP_FAILED) ::munmap(data_, size_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

uint32_t crc32(const unsigned char* data, size_t size) {
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
      made[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i)
      for (int k = 1; k < 8; ++k) made[k][i] = made[0][made[k - 1][i] & 0xFF] ^ (made[k - 1][i] >> 8);
    return made;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (; size >= 8; size -= 8, data += 8) {  // eight bytes at a time
    uint32_t low = crc ^ (data[0] | data[1] << 8 | data[2] << 16 | static_cast<uint32_t>(data[3]) << 24);
    crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^ tables[4][low >> 24] ^
          tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^ tables[0][data[7]];
  }
  for (; size; --size, ++data) crc = tables[0][(crc ^ *data) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

Json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw ExportError(path + " cannot be opened: the folder holds no whole export");
  std::stringstream text;
  text << file.rdbuf();
  try {
    return Json::parse(text.str());
  } catch (const std::runtime_error& error) {
    throw ExportError(path + ": " + error.what() + "; export the run anew");
  }
}

Json read_index(const std::string& folder) {
  Json index = read_json(folder + "/export.json");
  try {
    const double format = index["format"].number();
    if (format < kOldest || format > kNewest) throw std::runtime_error("another format than this build reads");
    return index;
  } catch (const std::runtime_error& error) {
    throw ExportError(folder + "/export.json: " + error.what() + "; export the run anew");
  }
}

// The flags of this machine's processor.
std::set<std::string> flags_here() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

// That the compiled graph was made by this torch, for processors like this one: another one may end the process.
void check_compiled(const std::string& folder, const Json& index) {
  const std::string torch = index["versions"]["torch"].string();
  if (torch.substr(0, torch.find('+')) != TORCH_VERSION)
    throw ExportError(folder + " was compiled with torch " + torch + ", this server with " TORCH_VERSION
                      ": export it with that torch, or build the server anew");
  if (!index.members().contains("instructions")) return;  // an earlier export, which did not record them
  const std::set<std::string> here = flags_here();
  std::string lacks;
  for (const Json& flag : index["instructions"].array())
    if (!here.contains(flag.string())) lacks += " " + flag.string();
  if (!lacks.empty())
    throw ExportError(folder + " was compiled for " + index["march"].string() + " processors, this one lacks" + lacks +
                      ": export it for this machine");
}

}  // namespace

std::string version_of(const std::string& folder) {
  const Json index = read_index(folder);
  try {
    return index["version"].string();
  } catch (const std::runtime_error& error) {
    throw ExportError(folder + "/export.json: " + error.what() + "; export the run anew");
  }
}

std::shared_ptr<const Model> load_to_serve(const std::string& folder, size_t runners) {
  auto model = std::make_shared<const Model>(folder, runners);
  const Json parity = read_json(folder + "/parity.json");
  if (!parity.members().contains("within_limits") || !parity["within_limits"].boolean())
    throw ExportError(folder + ": its scores are outside their limits, or nobody compared them; export it anew");
  const auto features = static_cast<size_t>(model->num_features());
  const std::vector<float> dense(static_cast<size_t>(model->num_dense())), weights(features, 1.0f);
  std::vector<int64_t> offsets(features + 1);
  const std::vector<int64_t> ids(features);
  std::iota(offsets.begin(), offsets.end(), 0);
  Rows row{1, dense, offsets, ids, {}};
  if (model->weighted()) row.weights = weights;
  for (float logit : model->score(row))
    if (!std::isfinite(logit)) throw ExportError(folder + ": a row of zeros scores no number; look at its training");
  return model;
}

struct Model::State {
  std::string version;
  std::vector<std::string> keys;
  std::vector<int64_t> rows_of;  // of each key: every id lies below
  int64_t num_dense = 0, num_labels = 1;
  bool weighted = false;
  bool has_context = false;  // the graph takes a row of bags before the others, which belongs to all of them
  std::unique_ptr<Mapped> tables;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader;

  void check(const Rows& rows) const {
    const int64_t bags = static_cast<int64_t>(keys.size()) * rows.size, count = static_cast<int64_t>(rows.ids.size());
    if (rows.size < 0 || static_cast<int64_t>(rows.dense.size()) != rows.size * num_dense ||
        static_cast<int64_t>(rows.offsets.size()) != bags + 1 ||
        (weighted && static_cast<int64_t>(rows.weights.size()) != count))
      throw BadRows("sizes do not fit: dense is [B, " + std::to_string(num_dense) + "], offsets [" +
                    std::to_string(keys.size()) + " * B + 1], weights as many as ids");
    if (rows.offsets.front() != 0 || rows.offsets.back() != count)
      throw BadRows("offsets must go from 0 to the number of ids, " + std::to_string(count));
    for (int64_t bag = 0; bag < bags; ++bag)
      if (rows.offsets[bag + 1] < rows.offsets[bag] || rows.offsets[bag + 1] > count)
        throw BadRows(where(bag, rows.size) + ": its bag has a negative length");
    for (size_t key = 0; key < keys.size(); ++key)
      for (int64_t i = rows.offsets[key * rows.size]; i < rows.offsets[(key + 1) * rows.size]; ++i)
        if (rows.ids[i] < 0 || rows.ids[i] >= rows_of[key])
          throw BadRows("feature " + keys[key] + ": id " + std::to_string(rows.ids[i]) + " is outside the rows [0, " +
                        std::to_string(rows_of[key]) + ") of its table");
    for (size_t i = 0; i < rows.dense.size(); ++i)
      if (!std::isfinite(rows.dense[i]))
        throw BadRows("dense number " + std::to_string(i % num_dense) + " of row " + std::to_string(i / num_dense) +
                      " is not finite");
    for (float weight : rows.weights)
      if (!std::isfinite(weight)) throw BadRows("a weight of an id is not finite");
  }

  // As the graph takes them: before each feature's bags an empty one.
  std::vector<int64_t> offsets(const Rows& rows) const {
    std::vector<int64_t> made;
    made.reserve(rows.offsets.size() + keys.size());
    for (size_t key = 0; key < keys.size(); ++key) {
      const auto first = rows.offsets.begin() + static_cast<std::ptrdiff_t>(key) * rows.size;
      made.push_back(*first);
      made.insert(made.end(), first, first + rows.size);
    }
    made.push_back(rows.offsets.back());
    return made;
  }

  std::string where(int64_t bag, int64_t size) const {
    return "feature " + keys[bag / size] + ", row " + std::to_string(bag % size);
  }
};

Model::Model(const std::string& folder, size_t runners, bool checksums) : state_(std::make_unique<State>()) {
  Json index = read_index(folder);
  try {
    state_->version = index["version"].string();
    const Json& inputs = index["inputs"];
    for (const Json& key : inputs["keys"].array()) {
      state_->keys.push_back(key.string());
      state_->rows_of.push_back(static_cast<int64_t>(index["rows_of"][key.string()].number()));
    }
    state_->num_dense = static_cast<int64_t>(inputs["num_dense"].number());
    state_->num_labels = inputs["labels"].null() ? 1 : static_cast<int64_t>(inputs["labels"].array().size());
    state_->weighted = inputs["weighted"].boolean();
    state_->has_context = inputs.members().contains("context") && !inputs["context"].null();
    bool compiled = false;
    for (const Json& target : index["targets"].array()) compiled |= target.string() == "aoti";
    if (!compiled) throw ExportError(folder + " holds no compiled graph: export with --target aoti");
    check_compiled(folder, index);
    for (const auto& [name, file] : index["files"].members()) {
      if (name.find("..") != std::string::npos || name.starts_with("/"))
        throw ExportError(folder + "/export.json names a file outside the folder");
      const std::string path = folder + "/" + name;
      Mapped data(path);
      if (data.size() != static_cast<size_t>(file.array()[0].number()))
        throw ExportError(path + " has another size than when it was exported: copy it again");
      if (checksums && crc32(static_cast<unsigned char*>(data.data()), data.size()) != file.array()[1].number())
        throw ExportError(path + " is damaged, its checksum is another: copy it again");
    }
  } catch (const ExportError&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw ExportError(folder + "/export.json: " + error.what() + "; export the run anew");
  }
  state_->tables = std::make_unique<Mapped>(folder + "/tables.bin");
  try {
    state_->loader = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
        folder + "/aoti", "model", false, runners, static_cast<c10::DeviceIndex>(-1));
  } catch (const std::exception& error) {
    throw ExportError(folder + "/aoti cannot be loaded by this torch: " + error.what());
  }
}

Model::~Model() = default;

std::vector<float> Model::score(const Rows& rows) const {
  state_->check(rows);
  if (rows.size == 0) return {};
  c10::InferenceMode guard;
  auto view = [](const auto& span, at::IntArrayRef shape, at::ScalarType kind) {
    // torch reads inputs only; it has no tensor of constant data
    return at::from_blob(const_cast<void*>(static_cast<const void*>(span.data())), shape, at::TensorOptions(kind));
  };
  const std::vector<int64_t> with_context = state_->has_context ? state_->offsets(rows) : std::vector<int64_t>();
  const std::span<const int64_t> offsets = state_->has_context ? std::span(with_context) : rows.offsets;
  std::vector<at::Tensor> inputs{
      view(rows.dense, {rows.size, state_->num_dense}, at::kFloat),
      view(rows.ids, {static_cast<int64_t>(rows.ids.size())}, at::kLong),
      view(offsets, {static_cast<int64_t>(offsets.size())}, at::kLong),
      at::from_blob(state_->tables->data(), {static_cast<int64_t>(state_->tables->size())}, at::TensorOptions(at::kByte)),
  };
  if (state_->weighted) inputs.push_back(view(rows.weights, {static_cast<int64_t>(rows.weights.size())}, at::kFloat));
  at::Tensor logits = state_->loader->run(inputs)[0].contiguous();
  const float* first = logits.data_ptr<float>();
  return {first, first + logits.numel()};
}

const std::string& Model::version() const { return state_->version; }
int64_t Model::num_features() const { return static_cast<int64_t>(state_->keys.size()); }
int64_t Model::num_dense() const { return state_->num_dense; }
int64_t Model::num_labels() const { return state_->num_labels; }
bool Model::weighted() const { return state_->weighted; }

}  // namespace rayrec
