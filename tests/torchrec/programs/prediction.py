"""Prediction: a trained DLRM whose tables are quantized scores requests that hold plain tensors."""

import torch
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES, ROWS, DIM, BATCH, DENSE = ("user", "item", "category"), (40, 60, 9), 8, 7, 4


class PredictModule(torch.nn.Module):
    """From a request's tensors to scores."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sparse = KeyedJaggedTensor.from_lengths_sync(
            list(FEATURES), batch["id_list_features.values"], batch["id_list_features.lengths"]
        )
        logits = self.model(batch["float_features"], sparse)
        return {"default": logits.sigmoid().flatten()}


def request(place: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(place)
    lengths = torch.randint(0, 4, (len(FEATURES), BATCH), generator=numbers)
    ids = [
        torch.randint(rows, (int(count),), generator=numbers) for rows, count in zip(ROWS, lengths.sum(1), strict=True)
    ]
    return {
        "float_features": torch.rand(BATCH, DENSE, generator=numbers),
        "id_list_features.values": torch.cat(ids),
        "id_list_features.lengths": lengths.flatten().int(),
    }


def trained() -> DLRM:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(FEATURES, ROWS, strict=True)
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")), DENSE, [8, DIM], [8, 1])
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(model.named_parameters())):
            weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.21 + place).view(weight.shape) / 2)
    return model.eval()


def main() -> list[float]:
    found: list[float] = []
    for dtype in (torch.int8, torch.float16, torch.quint4x2):
        quantized = quantize_inference_model(trained(), quantization_dtype=dtype)
        kinds = [type(module) for module in quantized.modules()]
        assert QuantEmbeddingBagCollection in kinds and EmbeddingBagCollection not in kinds
        predict = PredictModule(quantized).eval()
        with torch.no_grad():
            for place in range(3):
                found += predict(request(place))["default"].tolist()
    return found


if __name__ == "__main__":
    print(main())
