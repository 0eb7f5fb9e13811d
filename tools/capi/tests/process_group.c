/* Three processes in a process group, through the C interface alone: collectives and messages, a member that is killed
 * in the middle of a sum, one that takes its place, one that is deactivated, and bad arguments. Rank 0 launches the
 * coordinator. Prints one line for each check; the exit status is the number of processes with failed checks. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "mooncake_pg.h"

enum { RANKS = 3, MOST = 4, SHORT = 1000, LONG = 1 << 20, TEXT = 256, PATIENCE_S = 60 };

static int failures, own;

static void check(int holds, const char *what) {
    printf("%s: rank %d: %s %s\n", holds ? "ok" : "FAILED", own, what, holds ? "" : mooncakePgGetLastError());
    fflush(stdout);
    failures += !holds;
}

/* One membership, and what its last operation said. */
struct member {
    mooncakePgContext_t context;
    mooncakePgComm_t comm;
    int32_t mirror[MOST], hint[MOST];
    mooncakePgCompletion_t completion;
};

/* Waits for the operation that has begun, and frees its completion. */
static int finish(struct member *member, mooncakePgResult_t begun) {
    if (begun != mooncakePgSuccess) return 0;
    int completed = -1;
    mooncakePgResult_t ended = mooncakePgCompletionWait(member->completion, (int64_t)PATIENCE_S * 1000000);
    int holds = ended == mooncakePgSuccess &&
                mooncakePgCompletionIsCompleted(member->completion, &completed) == mooncakePgSuccess && completed == 1;
    return holds && mooncakePgCompletionDestroy(member->completion) == mooncakePgSuccess;
}

static int nobody_failed(const struct member *member) {
    for (int rank = 0; rank < MOST; rank++)
        if (member->hint[rank]) return 0;
    return 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Waits until a rank is active, or is not. */
static int await_active(struct member *member, int rank, int32_t wanted) {
    int32_t active[MOST] = {0};
    for (double until = now() + PATIENCE_S; now() < until; usleep(5000)) {
        if (mooncakePgCommGetActiveRanks(member->comm, active, MOST) != mooncakePgSuccess) return 0;
        if (active[rank] == wanted) return 1;
    }
    return 0;
}

/* Waits until ranks 1 and 2 are synced, or are not: the members learn that from the control plane. */
static int await_states(struct member *member, int32_t first, int32_t second) {
    static const int32_t ranks[2] = {1, 2};
    int32_t states[2] = {-1, -1};
    int synced = -1;
    for (double until = now() + PATIENCE_S; now() < until; usleep(5000)) {
        if (mooncakePgCommGetPeerState(member->comm, ranks, 2, states) != mooncakePgSuccess) return 0;
        if (mooncakePgCommGetNumSyncedRanks(member->comm, &synced) != mooncakePgSuccess) return 0;
        if (states[0] == first && states[1] == second && synced == 1 + first + second) return 1;
    }
    return 0;
}

static mooncakePgCommConfig_t description(struct member *member, int rank) {
    static const int32_t order[RANKS] = {0, 1, 2};
    mooncakePgCommConfig_t config = MOONCAKE_PG_COMM_CONFIG_INITIALIZER;
    config.groupId = "everybody";
    config.rank = rank;
    config.size = RANKS;
    config.maxGroupSize = MOST;
    config.globalRanks = order;
    config.globalRankCount = RANKS;
    config.deviceType = mooncakePgDeviceCpu;
    config.activeRanksMirror = member->mirror;
    config.activeRanksMirrorCount = MOST;
    return config;
}

static int refused(mooncakePgContext_t context, const mooncakePgCommConfig_t *config, mooncakePgResult_t as) {
    mooncakePgComm_t comm = (mooncakePgComm_t)1;
    return mooncakePgCommCreate(context, config, &comm) == as && comm == NULL && strlen(mooncakePgGetLastError()) > 10;
}

/* Descriptions that are refused. */
static void bad_descriptions(struct member *member) {
    static int32_t many[MOONCAKE_PG_MAX_RANKS + 1];
    for (int rank = 0; rank <= MOONCAKE_PG_MAX_RANKS; rank++) many[rank] = rank;
    mooncakePgContext_t context = member->context;
    mooncakePgCommConfig_t config = description(member, own);
    check(refused(context, NULL, mooncakePgInvalidArgument), "no description");
    check(refused(NULL, &config, mooncakePgInvalidArgument), "no context");
    check(mooncakePgCommCreate(context, &config, NULL) == mooncakePgInvalidArgument, "no place for the communicator");
    config.magic = 0x20B6DE6A;
    check(refused(context, &config, mooncakePgInvalidArgument) && strstr(mooncakePgGetLastError(), "magic"),
          "a wrong magic");
    config = description(member, own);
    config.version = 2;
    check(refused(context, &config, mooncakePgInvalidArgument), "a wrong version");
    config = description(member, own);
    config.structSize = 96;
    check(refused(context, &config, mooncakePgInvalidArgument) && strstr(mooncakePgGetLastError(), "structSize"),
          "a wrong size of the struct");
    config = description(member, own);
    config.globalRanks = many;
    config.globalRankCount = MOONCAKE_PG_MAX_RANKS + 1;
    config.size = config.maxGroupSize = MOONCAKE_PG_MAX_RANKS + 1;
    check(refused(context, &config, mooncakePgInvalidArgument), "65 ranks");
    config = description(member, own);
    config.maxGroupSize = MOONCAKE_PG_MAX_RANKS + 1;
    check(refused(context, &config, mooncakePgInvalidArgument), "a largest size of 65");
    config = description(member, own);
    config.globalRanks = NULL;
    check(refused(context, &config, mooncakePgInvalidArgument), "no global ranks");
    config = description(member, own);
    config.groupId = NULL;
    check(refused(context, &config, mooncakePgInvalidArgument), "no name");
    config = description(member, own);
    config.autoDeactivateOnFailure = 0;
    check(refused(context, &config, mooncakePgInvalidArgument), "automatic in halves");
    config = description(member, own);
    config.activeRanksMirrorCount = MOST - 1;
    check(refused(context, &config, mooncakePgInvalidArgument), "a mirror that is too short");
    config = description(member, own);
    config.deviceType = mooncakePgDeviceGpu;
    check(refused(context, &config, mooncakePgNotSupported), "memory of a device");
}

/* Operations that are refused; none of them takes a number of the group's sequence. */
static void bad_operations(struct member *member) {
    enum { INVALID = mooncakePgInvalidArgument, UNSUPPORTED = mooncakePgNotSupported };
    int32_t number = 7, ranks[1] = {MOST}, states[1], *hint = member->hint;
    mooncakePgComm_t comm = member->comm, foreign = (mooncakePgComm_t)member->context;
    mooncakePgCompletion_t *completion = &member->completion;
    const mooncakePgDataType_t type = mooncakePgInt32;
#define SUM(SEND, TYPE, REDUCTION, COMM, HINT, ENTRIES, COMPLETION)                                                    \
    (int)mooncakePgAllReduceCpu(SEND, &number, 1, TYPE, REDUCTION, COMM, HINT, ENTRIES, COMPLETION)
    check(SUM(NULL, type, mooncakePgSum, comm, hint, MOST, completion) == INVALID && !*completion && number == 7,
          "no send buffer");
    check(SUM(&number, type, mooncakePgSum, NULL, hint, MOST, completion) == INVALID, "no communicator");
    check(SUM(&number, type, mooncakePgSum, foreign, hint, MOST, completion) == INVALID, "another handle");
    check(SUM(&number, type, mooncakePgSum, comm, NULL, 0, completion) == INVALID, "no hint");
    check(SUM(&number, type, mooncakePgSum, comm, hint, MOST - 1, completion) == INVALID, "a short hint");
    check(SUM(&number, type, mooncakePgSum, comm, hint, MOST, NULL) == INVALID, "no place for the completion");
    check(SUM(&number, (mooncakePgDataType_t)18, mooncakePgSum, comm, hint, MOST, completion) == INVALID,
          "no such type");
    check(SUM(&number, type, (mooncakePgReduceOp_t)5, comm, hint, MOST, completion) == INVALID, "no such reduction");
    check(SUM(&number, type, mooncakePgAvg, comm, hint, MOST, completion) == UNSUPPORTED, "an average of integers");
    check(SUM(&number, mooncakePgFloat8e5m2, mooncakePgSum, comm, hint, MOST, completion) == UNSUPPORTED,
          "a sum of a type that is only moved");
#undef SUM
    check((int)mooncakePgBroadcastCpu(&number, &number, 1, type, RANKS, comm, hint, MOST, completion) == INVALID,
          "no such root");
    check((int)mooncakePgSendCpu(&number, 1, type, MOST, comm, hint, MOST, completion) == INVALID, "no such peer");
    check((int)mooncakePgSendCpu(&number, 1, type, 0, comm, hint, MOST, completion) == INVALID, "a message to itself");
    check((int)mooncakePgSendCpu(&number, SIZE_MAX, type, 1, comm, hint, MOST, completion) == INVALID,
          "too many elements");
    check((int)mooncakePgCommGetPeerState(comm, ranks, 1, states) == INVALID, "no such rank");
    check((int)mooncakePgCommActivateRanks(comm, ranks, 0, NULL) == INVALID, "no response");
    check((int)mooncakePgCommGetActiveRanks(comm, states, 1) == INVALID, "too little room");
    check((int)mooncakePgCommGetRank(comm, NULL) == INVALID, "no place for the rank");
    check(mooncakePgCommJoin(comm) == mooncakePgInvalidState, "it takes part already");
    check((int)mooncakePgCompletionWait(NULL, 0) == INVALID, "no completion");
    check(mooncakePgContextDestroy(member->context) == mooncakePgResourceBusy, "the context is in use");
    check((int)mooncakePgAllReduceGpu(&number, &number, 1, type, mooncakePgSum, comm, NULL, hint, MOST) ==
                  UNSUPPORTED &&
              strstr(mooncakePgGetLastError(), "mooncakePgAllReduceCpu"),
          "a sum in the memory of a device");
    check((int)mooncakePgRecvGpu(&number, 1, type, 1, comm, NULL, hint, MOST, completion) == UNSUPPORTED,
          "a message into the memory of a device");
    check(!strcmp(mooncakePgGetErrorString(mooncakePgSuccess), "success"), "results have a meaning");
}

/* A sum of rank + 1 at each place; returns what the first and the last place have if they are alike, else -1. */
static int sum(struct member *member, int32_t *send, int32_t *receive, size_t count) {
    for (size_t at = 0; at < count; at++) send[at] = own + 1, receive[at] = -1;
    if (!finish(member, mooncakePgAllReduceCpu(send, receive, count, mooncakePgInt32, mooncakePgSum, member->comm,
                                               member->hint, MOST, &member->completion)))
        return -1;
    return send[0] == own + 1 && receive[0] == receive[count - 1] ? receive[0] : -1;
}

/* Every collective among all three. */
static void collectives(struct member *member) {
    static int32_t send[SHORT], receive[SHORT];
    check(sum(member, send, receive, SHORT) == 6 && nobody_failed(member), "all_reduce");

    float halves[2] = {(float)own, 0.5f};
    check(finish(member, mooncakePgAllReduceCpu(halves, halves, 2, mooncakePgFloat32, mooncakePgAvg, member->comm,
                                                member->hint, MOST, &member->completion)) &&
              halves[0] == 1.0f && halves[1] == 0.5f,
          "all_reduce in place, an average");

    int64_t from = own == 1 ? 42 : -1, into = 0;
    check(finish(member, mooncakePgBroadcastCpu(own == 1 ? &from : NULL, &into, 1, mooncakePgInt64, 1, member->comm,
                                                member->hint, MOST, &member->completion)) &&
              into == 42,
          "broadcast");

    uint16_t part[2] = {(uint16_t)(0xff00 + own), (uint16_t)own}, parts[2 * RANKS];
    mooncakePgCompletion_t *completion = &member->completion;
    mooncakePgComm_t comm = member->comm;
    int holds = finish(member, mooncakePgAllGatherCpu(part, parts, 2, mooncakePgUint16, comm, member->hint, MOST,
                                                      completion));
    for (int rank = 0; rank < RANKS; rank++) holds &= parts[2 * rank] == 0xff00 + rank && parts[2 * rank + 1] == rank;
    check(holds, "all_gather");
    memset(parts, 0, sizeof parts);
    memcpy(parts + 2 * own, part, sizeof part);
    holds = finish(member, mooncakePgAllGatherCpu(parts + 2 * own, parts, 2, mooncakePgUint16, comm, member->hint, MOST,
                                                  completion));
    for (int rank = 0; rank < RANKS; rank++) holds &= parts[2 * rank] == 0xff00 + rank && parts[2 * rank + 1] == rank;
    check(holds, "all_gather in place");

    double wide[RANKS] = {1.0 + own, 10.0 + own, 100.0 + own}, narrow = 0;
    static const double widest[RANKS] = {3, 12, 102};
    check(finish(member, mooncakePgReduceScatterCpu(wide, &narrow, 1, mooncakePgFloat64, mooncakePgMax, member->comm,
                                                    member->hint, MOST, &member->completion)) &&
              narrow == widest[own],
          "reduce_scatter");

    int8_t out[RANKS], in[RANKS];
    for (int rank = 0; rank < RANKS; rank++) out[rank] = (int8_t)(10 * own + rank);
    holds = finish(member, mooncakePgAllToAllCpu(out, in, 1, mooncakePgInt8, member->comm, member->hint, MOST,
                                                 &member->completion));
    for (int rank = 0; rank < RANKS; rank++) holds &= in[rank] == 10 * rank + own;
    check(holds, "all_to_all");

    uint32_t factor = (uint32_t)own + 2, product = 0;
    check(finish(member, mooncakePgReduceCpu(&factor, own == 2 ? &product : NULL, 1, mooncakePgUint32,
                                             mooncakePgProduct, 2, comm, member->hint, MOST, completion)) &&
              factor == (uint32_t)own + 2 && product == (own == 2 ? 24 : 0),
          "reduce");

    uint8_t byte = (uint8_t)(0xf0 + own), bytes[RANKS] = {0};
    holds = finish(member, mooncakePgGatherCpu(&byte, own == 0 ? bytes : NULL, 1, mooncakePgFloat8e4m3fn, 0, comm,
                                               member->hint, MOST, completion));
    for (int rank = 0; own == 0 && rank < RANKS; rank++) holds &= bytes[rank] == 0xf0 + rank;
    check(holds, "gather");

    static const uint64_t given[RANKS] = {5, 6, 7};
    uint64_t taken = 0;
    check(finish(member, mooncakePgScatterCpu(own == 0 ? given : NULL, &taken, 1, mooncakePgUint64, 0, member->comm,
                                              member->hint, MOST, &member->completion)) &&
              taken == given[own],
          "scatter");
    check(finish(member, mooncakePgBarrierCpu(member->comm, member->hint, MOST, &member->completion)), "barrier");

    /* A ring of messages: all send before they receive. */
    int32_t message = 100 + own, got = 0, other[MOST];
    mooncakePgCompletion_t sent;
    mooncakePgResult_t begun = mooncakePgSendCpu(&message, 1, mooncakePgInt32, (own + 1) % RANKS, member->comm, other,
                                                 MOST, &sent);
    check(finish(member, mooncakePgRecvCpu(&got, 1, mooncakePgInt32, (own + 2) % RANKS, comm, member->hint, MOST,
                                           completion)) &&
              got == 100 + (own + 2) % RANKS,
          "receive");
    member->completion = sent;
    check(finish(member, begun) && nobody_failed(member), "send");
    /* Nobody needs anything of a member any more that passes this. */
    check(finish(member, mooncakePgBarrierCpu(comm, member->hint, MOST, completion)), "and all have received");
}

/* The survivors of rank 2 find that it is gone, and take in another process of that rank. */
static void survive(struct member *member, int32_t *send, int32_t *receive) {
    check(sum(member, send, receive, LONG) == 3, "the sum of the survivors");
    check(!member->hint[0] && !member->hint[1] && member->hint[2] == 1, "who failed is said");
    check(member->mirror[0] == 1 && member->mirror[1] == 1 && member->mirror[2] == 0 && member->mirror[3] == 0,
          "the mirror has the survivors");
    uint64_t epoch = 0;
    int size = 0;
    check(mooncakePgCommGetEpoch(member->comm, &epoch) == mooncakePgSuccess && epoch > 1, "another view");
    check(mooncakePgCommGetSize(member->comm, &size) == mooncakePgSuccess && size == 2, "the survivors' size");
    check(await_states(member, 1, 0), "states of peers");
    mooncakePgSyncAfterFailureResponse_t response;
    check(mooncakePgCommSyncAfterFailure(member->comm, &response) == mooncakePgSuccess &&
              response.status == mooncakePgSyncNoPending,
          "nothing is left to reconcile");
    check(sum(member, send, receive, SHORT) == 3 && nobody_failed(member), "the next sum");
}

/* Rank 0 activates rank 2, once it is ready; all three go on; then rank 0 deactivates it. */
static void change_members(struct member *member, int32_t *send, int32_t *receive) {
    mooncakePgProposalResponse_t response;
    int32_t rank = 2;
    if (own == 0) {
        check(await_states(member, 1, 1), "the joiner is ready");
        check(mooncakePgCommActivateRanks(member->comm, &rank, 1, &response) == mooncakePgSuccess &&
                  response.status == mooncakePgProposalApplied && response.newEpoch > 2 && !response.droppedRankCount,
              "it is activated");
        check(mooncakePgCommActivateRanks(member->comm, &rank, 1, &response) == mooncakePgSuccess &&
                  response.status == mooncakePgProposalApplied,
              "and activated again");
    }
    check(await_active(member, 2, 1), "it is active");
    check(sum(member, send, receive, SHORT) == 6 && nobody_failed(member), "the sum with the joiner");
    /* Before it is deactivated, all have the sum; the barrier itself may end for it. */
    int all = finish(member, mooncakePgBarrierCpu(member->comm, member->hint, MOST, &member->completion));
    check(all || own == 2, "all have it");
    if (own == 0)
        check(mooncakePgCommDeactivateRanks(member->comm, &rank, 1, &response) == mooncakePgSuccess &&
                  response.status == mooncakePgProposalApplied,
              "it is deactivated");
    check(await_active(member, 2, 0), "it is not active any more");
    if (own == 2) {
        check(mooncakePgBarrierCpu(member->comm, member->hint, MOST, &member->completion) == mooncakePgInvalidState,
              "a deactivated member calls nothing");
        return;
    }
    check(sum(member, send, receive, SHORT) == 3 && nobody_failed(member), "the sum without it");
    /* Before one of them leaves, the other has its sum: who passes this may have lost the other meanwhile. */
    check(finish(member, mooncakePgBarrierCpu(member->comm, member->hint, MOST, &member->completion)), "both have it");
}

/* One process. To the descriptor it writes the coordinator's address, if it launches one, and how far it has come. */
static int process(int rank, const char *address, int is_joiner, int tell) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(3 * PATIENCE_S);
    own = rank;
    struct member member = {.comm = NULL};
    check(mooncakePgContextCreate(&member.context) == mooncakePgSuccess, "a context");
    check(mooncakePgContextInitialize(member.context, rank, RANKS) == mooncakePgSuccess, "a place in the world");
    char launched[TEXT] = "";
    if (!*address) {
        check(mooncakePgContextLaunchCoordinator(member.context, launched, 8) == mooncakePgInvalidArgument,
              "too little room for the address");
        check(mooncakePgContextLaunchCoordinator(member.context, launched, sizeof launched) == mooncakePgSuccess,
              "a coordinator");
        address = launched;
        dprintf(tell, "%s\n", launched);
    }
    if (mooncakePgContextConnectCoordinator(member.context, address) != mooncakePgSuccess) {
        check(0, "the world");
        return failures;
    }
    if (rank == 0) bad_descriptions(&member);
    mooncakePgCommConfig_t config = description(&member, rank);
    if (is_joiner) config.idResolvePolicy = mooncakePgIdResolveAttachOrExtend;
    /* The struct as it was before its last field. */
    if (rank == 1) config.structSize = 104;
    if (mooncakePgCommCreate(member.context, &config, &member.comm) != mooncakePgSuccess) {
        check(0, "the group");
        return failures;
    }
    int found = -1, size = -1, most = -1;
    check(mooncakePgCommGetRank(member.comm, &found) == mooncakePgSuccess && found == rank, "its rank");
    check(mooncakePgCommGetSize(member.comm, &size) == mooncakePgSuccess && size == RANKS, "its size");
    check(mooncakePgCommGetMaxGroupSize(member.comm, &most) == mooncakePgSuccess && most == MOST, "its largest size");

    int32_t *send = malloc(LONG * sizeof *send), *receive = malloc(LONG * sizeof *receive);
    if (is_joiner) {
        check(member.mirror[0] == 0 && member.mirror[2] == 1, "a joiner is alone");
        check(sum(&member, send, receive, SHORT) == rank + 1, "its sum is its own");
        check(mooncakePgCommJoin(member.comm) == mooncakePgSuccess, "it joins");
    } else {
        check(member.mirror[0] == 1 && member.mirror[1] == 1 && member.mirror[2] == 1 && member.mirror[3] == 0,
              "the mirror has all");
        collectives(&member);
        if (rank == 0) bad_operations(&member);
        dprintf(tell, "ready\n");
        /* Rank 2 is killed here. */
        while (rank == 2) pause();
        survive(&member, send, receive);
        dprintf(tell, "survived\n");
    }
    change_members(&member, send, receive);
    check(mooncakePgCommDestroy(member.comm) == mooncakePgSuccess, "it leaves the group");
    check(mooncakePgCommGetRank(member.comm, &found) == mooncakePgInvalidArgument, "its handle is gone");
    check(mooncakePgContextDestroy(member.context) == mooncakePgSuccess, "it leaves the world");
    check(mooncakePgContextDestroy(NULL) == mooncakePgSuccess && mooncakePgCommDestroy(NULL) == mooncakePgSuccess &&
              mooncakePgCompletionDestroy(NULL) == mooncakePgSuccess,
          "null is ignored");
    free(send), free(receive);
    return failures;
}

/* Starts this program as a rank. */
static pid_t start(int rank, const char *address, const char *how, int tell) {
    pid_t pid = fork();
    if (pid == 0) {
        char number[16], descriptor[16];
        snprintf(number, sizeof number, "%d", rank);
        snprintf(descriptor, sizeof descriptor, "%d", tell);
        execl("/proc/self/exe", "process_group", number, address, how, descriptor, (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Reads a line that a process wrote. */
static int read_line(int from, char *line, size_t room) {
    for (size_t at = 0; at + 1 < room; at++) {
        ssize_t read_bytes = read(from, line + at, 1);
        if (read_bytes < 0 && errno == EINTR) at--;
        else if (read_bytes != 1) return 0;
        else if (line[at] == '\n') return line[at] = 0, 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 5) return process(atoi(argv[1]), argv[2], !strcmp(argv[3], "joins"), atoi(argv[4])) != 0;
    int told[2][2];
    char address[TEXT], line[TEXT];
    if (pipe(told[0]) || pipe(told[1])) return 1;
    pid_t first = start(0, "", "founds", told[0][1]);
    close(told[0][1]);
    if (!read_line(told[0][0], address, sizeof address)) return fputs("no coordinator\n", stderr), 1;
    pid_t second = start(1, address, "founds", told[1][1]), third = start(2, address, "founds", told[1][1]);
    close(told[1][1]);
    int holds = 1;
    for (int rank = 0; rank < RANKS; rank++)
        holds &= read_line(told[rank > 0][0], line, sizeof line) && !strcmp(line, "ready");
    kill(third, SIGKILL);
    waitpid(third, NULL, 0);
    for (int rank = 0; rank < 2; rank++)
        holds &= read_line(told[rank][0], line, sizeof line) && !strcmp(line, "survived");
    pid_t fourth = start(2, address, "joins", told[1][0]);
    int status, bad = !holds;
    for (int left = 3; left > 0; left--) {
        pid_t ended = wait(&status);
        int is_one = ended == first || ended == second || ended == fourth;
        bad += !is_one || !WIFEXITED(status) || WEXITSTATUS(status);
    }
    return bad;
}
