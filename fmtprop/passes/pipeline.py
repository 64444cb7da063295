"""The rewrites that bring an imported graph to normal form, in order."""

from __future__ import annotations

from fmtprop.passes.base import Pass
from fmtprop.passes.precision.centred_weights import CentredWeights
from fmtprop.passes.precision.channel_scales import ChannelScales
from fmtprop.passes.precision.codes_of_experts import CodesOfExperts
from fmtprop.passes.precision.dynamic_pairs import DynamicPairs
from fmtprop.passes.precision.integer_products import IntegerProducts
from fmtprop.passes.precision.keep_scores import KeepScores
from fmtprop.passes.precision.lower import WidenPrecision
from fmtprop.passes.precision.mark_exact import MarkExact
from fmtprop.passes.precision.mark_grids import MarkGrids
from fmtprop.passes.precision.pair_quantization import PairQuantization
from fmtprop.passes.precision.recognise_codes import RecogniseCodes
from fmtprop.passes.precision.recognise_dynamic import RecogniseDynamic
from fmtprop.passes.precision.shifted_rows import ShiftedRows
from fmtprop.passes.rewrites.before_concat import BeforeConcat
from fmtprop.passes.rewrites.channel_shuffle import RecogniseShuffle
from fmtprop.passes.rewrites.deconvolve_pixels import DeconvolvePixels
from fmtprop.passes.rewrites.delay_reshapes import DelayReshapes
from fmtprop.passes.rewrites.few_queries import FewQueries
from fmtprop.passes.rewrites.few_rows import FewRows
from fmtprop.passes.rewrites.fold_batch_norm import FoldBatchNorm
from fmtprop.passes.rewrites.fold_constants import FoldConstants
from fmtprop.passes.rewrites.fold_padding import FoldPadding
from fmtprop.passes.rewrites.fuse_post_ops import FusePostOps
from fmtprop.passes.rewrites.join_writes import JoinWrites
from fmtprop.passes.rewrites.nest_concats import NestConcats
from fmtprop.passes.rewrites.recognise_functions import RecogniseFunctions
from fmtprop.passes.rewrites.recognise_group_norm import RecogniseGroupNorm
from fmtprop.passes.rewrites.recognise_lrn import RecogniseLrn
from fmtprop.passes.rewrites.recognise_rms_norm import RecogniseRmsNorm
from fmtprop.passes.rewrites.recognise_rotary import RecogniseRotary
from fmtprop.passes.rewrites.release_sums import ReleaseSums
from fmtprop.passes.rewrites.remove_identities import RemoveIdentities
from fmtprop.passes.rewrites.single_numbers import SingleNumbers
from fmtprop.passes.rewrites.unmerge_batches import UnmergeBatches
from fmtprop.passes.training.batch_statistics import ReadVariance
from fmtprop.passes.training.join_additions import JoinAdditions
from fmtprop.passes.training.join_gradients import JoinGradients

#: imported graph -> normal graph
NORMALISE: tuple[Pass, ...] = (
    # first, so that nothing stands between the nodes of a pattern
    RemoveIdentities(),
    # before attention and its post-ops are looked for
    UnmergeBatches(),
    # early, so that constants are folded and functions recognised in the type of the computation
    WidenPrecision(),
    # after it, since then no dead node reads a tensor between two writes
    JoinWrites(),
    JoinGradients(),
    ReadVariance(),
    # before constants are folded, and before quantized ones become real numbers
    RecogniseCodes(),
    CodesOfExperts(),
    # before their steps are pairs
    RecogniseDynamic(),
    DynamicPairs(),
    IntegerProducts(),
    # before constants are folded, which keeps a grid only where there is one already
    PairQuantization(),
    # weights behind views become weights
    FoldConstants(),
    # before functions are recognised
    SingleNumbers(),
    RecogniseShuffle(),
    # before its steps become post-ops of other nodes
    RecogniseFunctions(),
    RecogniseRmsNorm(),
    RecogniseRotary(),
    # before DelayReshapes
    RecogniseGroupNorm(),
    # before FoldPadding, since a spelled-out LRN contains a padding
    RecogniseLrn(),
    FoldPadding(),
    # before normalizations are folded into the producers of the parts
    BeforeConcat(),
    FoldBatchNorm(),
    ChannelScales(),
    # after weights are folded; before fusion. The sums of rows may be shifted, too.
    CentredWeights(),
    ShiftedRows(),
    # after normalizations are folded into the channels; before DelayReshapes, which moves the activation
    DeconvolvePixels(),
    # before FewRows, which takes the products of attention apart
    FewQueries(),
    # before fusion, so that sums of products are fused
    FewRows(),
    # before fusion, which makes post-ops of additions
    JoinAdditions(),
    # before fusion, which fuses neighbours
    DelayReshapes(),
    # before fusion, which asks for the readers of a sum's operand
    NestConcats(),
    # before fusion: an op that loses special values is no post-op of a node that must keep them
    MarkExact(),
    # a fused op matches no pattern any more
    FusePostOps(),
    # late, since post-ops are a part of the scores
    KeepScores(),
    # a rounding may be a post-op
    MarkGrids(),
    # last, since grids tell which sums are none of bytes
    ReleaseSums(),
)

#: passes that ask for ops, types and constants, hardly for sizes: where one changed nothing for a shape of a model, it
#: is left out for the others. None is needed for right results.
STRUCTURAL: frozenset[str] = frozenset(
    one.name
    for one in NORMALISE
    if isinstance(
        one,
        JoinWrites | JoinGradients | ReadVariance | RecogniseCodes | CodesOfExperts | RecogniseDynamic | DynamicPairs
        | IntegerProducts | SingleNumbers | RecogniseShuffle | RecogniseFunctions | RecogniseRmsNorm | RecogniseRotary
        | RecogniseGroupNorm | RecogniseLrn | FoldPadding | BeforeConcat | FoldBatchNorm | CentredWeights | ShiftedRows
        | JoinAdditions | NestConcats,
    )
)  # fmt: skip
