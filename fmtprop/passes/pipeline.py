"""The rewrites that bring an imported graph to normal form, in order."""

from __future__ import annotations

from fmtprop.passes.absorb_flatten import AbsorbFlatten
from fmtprop.passes.base import Pass
from fmtprop.passes.batch_statistics import ReadVariance
from fmtprop.passes.before_concat import BeforeConcat
from fmtprop.passes.channel_shuffle import RecogniseShuffle
from fmtprop.passes.delay_reshapes import DelayReshapes
from fmtprop.passes.fold_batch_norm import FoldBatchNorm
from fmtprop.passes.fold_constants import FoldConstants
from fmtprop.passes.fold_padding import FoldPadding
from fmtprop.passes.fuse_post_ops import FusePostOps
from fmtprop.passes.join_writes import JoinWrites
from fmtprop.passes.mark_exact import MarkExact
from fmtprop.passes.recognise_functions import RecogniseFunctions
from fmtprop.passes.recognise_lrn import RecogniseLrn
from fmtprop.passes.remove_identities import RemoveIdentities

__all__ = ["NORMALISE"]

#: imported graph -> normal graph
NORMALISE: tuple[Pass, ...] = (
    # first, so that the patterns of the others are not interrupted
    RemoveIdentities(),
    # behind it, as nothing dead reads a tensor in the making
    JoinWrites(),
    ReadVariance(),
    # weights behind views become weights
    FoldConstants(),
    RecogniseShuffle(),
    # before its steps are absorbed by what stands before them
    RecogniseFunctions(),
    # before the padding that it consists of is folded
    RecogniseLrn(),
    FoldPadding(),
    # before normalizations are folded into what made the parts
    BeforeConcat(),
    FoldBatchNorm(),
    AbsorbFlatten(),
    # before fusion, which fuses neighbours
    DelayReshapes(),
    # before fusion: what loses special values is no post-op where they count
    MarkExact(),
    # last: a fused op matches no pattern any more
    FusePostOps(),
)
