/* CUDA graphs: what a stream was given in capture, made executable. */
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

struct cpa_graph {
    cpa_device *device;
    cudaGraphExec_t executable;
};

/* Relaxed: other threads of the process, and the transports in this one, go on with calls that have nothing to do with
 * the stream. */
cpa_status cpa_cuda_graph_begin(cpa_stream *base) {
    cpa_cuda_stream *stream = (cpa_cuda_stream *)base;
    CPA_TRY(cpa_cuda_select(base->device, &base->error));
    CPA_TRY(cpa_cuda_check(&base->error, cudaStreamBeginCapture(stream->handle, cudaStreamCaptureModeRelaxed),
                           "graph: begin"));
    stream->capturing = 1;
    stream->captures++;
    return CPA_OK;
}

cpa_status cpa_cuda_graph_end(cpa_stream *base, cpa_graph **out) {
    cpa_cuda_stream *stream = (cpa_cuda_stream *)base;
    cudaGraph_t captured = NULL;
    cpa_status status = CPA_OK;
    cpa_graph *graph = NULL;
    stream->capturing = 0;
    stream->captures++;
    cudaError_t error = cudaStreamEndCapture(stream->handle, &captured);
    if (!out) {
        (void)cudaGetLastError();
        if (captured) (void)cudaGraphDestroy(captured);
        return CPA_OK;
    }
    CPA_TRY_GOTO(cpa_cuda_check(&base->error, error, "graph: end"), done);
    graph = calloc(1, sizeof *graph);
    if (!graph) {
        status = cpa_fail(&base->error, CPA_NO_MEMORY, "graph: no memory");
        goto done;
    }
    graph->device = base->device;
    CPA_TRY_GOTO(
        cpa_cuda_check(&base->error, cudaGraphInstantiate(&graph->executable, captured, 0), "graph: instantiate"),
        done);
    CPA_TRY_GOTO(cpa_cuda_check(&base->error, cudaGraphUpload(graph->executable, stream->handle), "graph: upload"),
                 done);
    *out = graph;
    graph = NULL;
done:
    cpa_cuda_graph_destroy(graph);
    if (captured) (void)cudaGraphDestroy(captured);
    return status;
}

cpa_status cpa_cuda_graph_launch(cpa_graph *graph, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_check(&stream->error, cudaGraphLaunch(graph->executable, cpa_cuda_handle(stream)), "graph: launch");
}

void cpa_cuda_graph_destroy(cpa_graph *graph) {
    if (!graph) return;
    (void)cpa_cuda_select(graph->device, NULL);
    if (graph->executable) (void)cudaGraphExecDestroy(graph->executable);
    free(graph);
}
