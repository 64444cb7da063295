"""Plans on Ray: :class:`Predictor` for ``Dataset.map_batches`` (``pip install "fmtprop[ray]"``)."""

from fmtprop.ray.predictor import Predictor

__all__ = ["Predictor"]
