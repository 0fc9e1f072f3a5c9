// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package importrule

import "slices"

// Module is the import path to which the patterns of rooms are relative.
const Module = "github.com/stormguard-mq/stormguard"

// A Room is a package and all packages below it that have no room of their own. Packages of
// one room may import each other.
type Room struct {
	Path string // relative to Module
	// May lists the rooms of this module that the room may import: a room's path, or a path
	// and "/..." for all rooms at and below it. Everything else is refused, so that a new
	// import is a decision and not an accident.
	May []string
	// MayTest lists what the room's test files may import in addition.
	MayTest []string
	Why     string
}

// A Ban refuses imports in rooms even if the other tables allow them.
type Ban struct {
	Rooms   []string // as Room.May
	Except  []string // as Room.May
	Imports []string // import paths; "/..." includes all paths below
	// Deep also refuses indirect imports, at any distance.
	Deep bool
	// Tests also refuses the import in test files. It never applies to indirect imports:
	// nobody depends on what a test links.
	Tests bool
	Why   string
}

// A Home says which rooms may import an outside library. The longest matching Imports wins,
// so a part of a library can have another home.
type Home struct {
	Imports string   // an import path and all below it
	Rooms   []string // as Room.May
	Tests   bool     // test files of any room may import it too
	Why     string
}

// Rules holds the tables that Check needs.
type Rules struct {
	Rooms []Room
	Bans  []Ban
	Homes []Home
}

// shipped are the rooms that a user's program can link. Our own programs build on these;
// the CLI may also import a few internal rooms.
var shipped = []string{
	"adapters/...", "console", "fleet/...", "guard/...", "limiter/...", "breaker/...",
	"dlq/...", "once/...",
}

// core are the rooms without brokers and without sockets.
var core = []string{
	"guard", "guard/guardtest", "limiter", "breaker", "dlq", "dlq/redrive", "internal/circuit", "internal/storm", "internal/credit",
	"internal/quarantine", "internal/ringbuf", "internal/ringbuf/spill", "internal/statefile", "internal/diskfile", "internal/crdt", "internal/escrow", "internal/fleetstate", "internal/scope",
	"once", "once/bolt",
}

// inside are internal rooms that implement a fleet.
var inside = []string{"internal/crdt", "internal/escrow", "internal/fleetstate", "internal/gossip"}

// linked are the rooms that a user's program may contain: shipped, and the internal rooms
// that they need.
var linked = slices.Concat(shipped, inside, []string{"internal/circuit", "internal/storm", "internal/credit", "internal/quarantine", "internal/mark", "internal/ringbuf/...", "internal/statefile", "internal/diskfile", "internal/operator", "internal/registers", "internal/scope"})

// programs are the rooms with a main package.
var programs = []string{"cmd/stormguard", "examples"}

// Ours are the rules of this module.
var Ours = Rules{
	Rooms: []Room{
		{
			Path: "cmd/stormguard", May: slices.Concat([]string{"internal/brokers", "internal/operator", "cmd/stormguard/internal/liveness", "chaos"}, inside, shipped),
			Why: "the CLI wires what is below it; it is not an example and takes no part from one",
		},
		{
			Path: "cmd/stormguard/internal/liveness", May: []string{"guard", "breaker", "dlq"},
			Why: "runs the guard that ships on virtual time, which Go has in testing/synctest only; the broker and the dependency are its own",
		},
		{Path: "internal/operator", Why: "who may ask a handler that operators use; fleet and console have one each"},
		{
			Path: "console", May: []string{"guard", "dlq", "dlq/redrive", "internal/operator"}, MayTest: []string{"guard/guardtest"},
			Why: "the console shows what guard and dlq decided and starts redrives; it decides nothing and knows no broker",
		},
		{
			Path: "examples", May: shipped, MayTest: []string{"internal/brokers"},
			Why: "an example shows what a user can write, so it imports what a user can import",
		},
		{Path: "chaos", Why: "plans faults and judges histories, also those of a user's own runs, so it knows no broker and no guard; the CLI runs them"},

		{
			Path: "adapters/kafka", May: []string{"guard", "dlq", "fleet/register", "internal/registers", "adapters/kafka/internal/..."},
			MayTest: []string{"guard/guardtest", "breaker", "internal/adaptertest", "internal/brokers", "internal/registertest"},
			Why:     "an adapter touches one broker and decides nothing; adapters never import each other",
		},
		{
			Path: "adapters/kafka/internal/retry", May: []string{"guard", "dlq", "adapters/kafka/internal/cluster", "adapters/kafka/internal/offsets"},
			Why: "retry topics know topics, offsets and the guard; the adapter opens their sources, and tells them what they need of a claim",
		},
		{
			Path: "adapters/kafka/internal/cluster", May: []string{"guard", "dlq"},
			Why: "what the adapter and its retry topics do with topics and single records, so it knows neither",
		},
		{Path: "adapters/kafka/internal/offsets", Why: "which offsets are settled, and how that is committed; needs nothing of ours"},
		{
			Path: "adapters/amqp", May: []string{"guard", "dlq", "fleet/register", "internal/registers"},
			MayTest: []string{"guard/guardtest", "breaker", "limiter", "internal/adaptertest", "internal/brokers", "internal/registertest"},
			Why:     "an adapter touches one broker and decides nothing; adapters never import each other",
		},
		{
			Path: "adapters/nats", May: []string{"guard", "dlq", "fleet/register", "internal/registers", "once", "internal/mark", "internal/credit"},
			MayTest: []string{"guard/guardtest", "breaker", "limiter", "internal/adaptertest", "internal/brokers", "internal/registertest", "internal/oncetest"},
			Why:     "an adapter touches one broker and decides nothing; adapters never import each other",
		},
		{
			Path: "adapters/nethttp", May: []string{"guard", "dlq"}, MayTest: []string{"guard/guardtest", "breaker"},
			Why: "an HTTP intake decides nothing, and has no dead-letter queue of its own but the type of its letters; adapters never import each other",
		},

		{
			Path: "fleet", May: slices.Concat([]string{"fleet/register", "limiter", "breaker", "dlq", "internal/circuit", "internal/storm", "internal/quarantine", "internal/operator"}, inside),
			MayTest: []string{"guard", "console"},
			Why:     "the one front of a fleet: it puts the parts together with sockets and goroutines; guards get what it makes, and do not know it",
		},
		{
			Path: "fleet/register", May: []string{"internal/registers", "internal/diskfile"}, MayTest: []string{"internal/registertest"},
			Why: "a leaf that adapters import: the seam and its errors, and the two drivers without a library",
		},
		{
			Path: "fleet/register/postgres", May: []string{"fleet/register", "internal/registers"}, MayTest: []string{"internal/brokers", "internal/registertest"},
			Why: "one outside library, behind the register's own interface",
		},
		{
			Path: "guard", May: []string{"limiter", "breaker", "dlq", "internal/circuit", "internal/storm", "internal/credit", "internal/quarantine", "internal/ringbuf", "internal/ringbuf/spill", "internal/statefile"},
			MayTest: []string{"guard/guardtest", "internal/fleetstate", "internal/crdt"},
			Why:     "the pipeline composes the leaves; brokers, transports and stores know the guard, never the reverse",
		},
		{
			Path: "guard/guardtest", May: []string{"guard", "limiter", "breaker", "dlq", "internal/circuit", "internal/ringbuf"},
			MayTest: []string{"internal/fleetstate", "internal/crdt"},
			Why:     "one suite and an in-memory broker for every adapter, so it knows none of them",
		},

		{
			Path: "limiter", May: []string{"internal/escrow"}, MayTest: []string{"internal/crdt"},
			Why: "what a user or a guard needs of a limit, whatever keeps it; a fleet's is internal/escrow's",
		},
		{
			Path: "limiter/redis", May: []string{"limiter"}, MayTest: []string{"guard", "internal/brokers"},
			Why: "one outside library, behind the limiter's own interface",
		},
		{Path: "limiter/limithttp", May: []string{"limiter"}, MayTest: []string{"fleet", "internal/crdt", "internal/escrow"}, Why: "serves the limiter and nothing else"},
		{Path: "limiter/limitgrpc", May: []string{"limiter"}, MayTest: []string{"fleet", "internal/crdt", "internal/escrow"}, Why: "one outside library, in front of the limiter"},
		{Path: "breaker", MayTest: []string{"internal/circuit"}, Why: "a leaf: settings of breakers, and what is shown of them"},
		{Path: "internal/circuit", May: []string{"breaker"}, Why: "the breakers themselves, for a guard and a fleet"},
		{
			Path: "breaker/etcd", May: []string{"breaker", "dlq", "internal/crdt", "internal/circuit", "internal/storm", "internal/scope", "fleet/register", "internal/registers"},
			MayTest: []string{"guard", "guard/guardtest", "internal/brokers", "internal/registertest", "internal/scopetest"},
			Why:     "an authority for those who want one, behind the breaker's own interface; what a vote means and what is done to breakers is internal/scope's, or there were two truths",
		},
		{Path: "dlq", Why: "a leaf: dead letters, how they are written, and the settings that say when"},
		{Path: "internal/storm", May: []string{"dlq"}, Why: "the storm detector, for a guard and a fleet"},
		{Path: "internal/quarantine", May: []string{"dlq"}, Why: "the list of rules of one process, and what a fleet's has in common with it"},
		{Path: "internal/credit", May: []string{"dlq"}, Why: "the budget of dead letters, for a guard and for whoever else moves messages to a DLQ"},
		{Path: "dlq/archive", May: []string{"dlq"}, Why: "what archives share; the interface is in dlq"},
		{
			Path: "dlq/archive/sqlite", May: []string{"dlq", "dlq/archive"},
			Why: "an archive implements dlq's interface; archives never import each other",
		},
		{
			Path: "dlq/archive/postgres", May: []string{"dlq", "dlq/archive"},
			Why: "an archive implements dlq's interface; archives never import each other",
		},
		{Path: "dlq/redrive", May: []string{"dlq"}, Why: "plans and lanes over an Archive, whichever it is and whoever sends"},
		{Path: "internal/ringbuf", Why: "a leaf: lanes and batches of anything"},
		{Path: "internal/ringbuf/spill", May: []string{"internal/ringbuf", "internal/diskfile"}, Why: "the same lane API on disk"},
		{Path: "internal/statefile", May: []string{"internal/diskfile"}, Why: "one document over restarts, whatever is in it"},
		{Path: "internal/diskfile", Why: "how files survive a crash; needs nothing of ours"},
		{Path: "once", MayTest: []string{"once/bolt", "guard"}, Why: "a leaf: a handler uses it without a guard, and a guard does not know it"},
		{
			Path: "once/bolt", May: []string{"once", "internal/mark", "internal/diskfile"}, MayTest: []string{"internal/oncetest"},
			Why: "one outside library, behind the store's own interface",
		},
		{
			Path: "once/postgres", May: []string{"once"}, MayTest: []string{"internal/brokers", "internal/oncetest"},
			Why: "one outside library; its marks are in the user's transactions",
		},

		{Path: "internal/apilist", Why: "reads source files; needs nothing of ours"},
		{Path: "internal/mark", Why: "how stores of once write a mark, so it knows none of them"},
		{Path: "internal/oncetest", May: []string{"once"}, Why: "one suite for every store of once, so it knows none of them"},
		{Path: "internal/importrule", Why: "reads import graphs; needs nothing of ours"},
		{Path: "internal/crdt", Why: "a leaf: replicated data types and nothing of ours"},
		{
			Path: "internal/gossip", May: []string{"internal/crdt"},
			Why: "gossip moves opaque named sections and must not know what is in them",
		},
		{
			Path: "internal/escrow", May: []string{"internal/crdt"}, MayTest: []string{"internal/gossip"},
			Why: "the limits of a fleet's process keep their state in crdt; how it travels is the gossip's matter",
		},
		{
			Path: "internal/fleetstate", May: []string{"internal/crdt", "internal/escrow", "breaker", "dlq", "internal/circuit", "internal/storm", "internal/quarantine", "internal/scope"},
			MayTest: []string{"internal/gossip", "internal/scopetest"},
			Why:     "what processes agree on implements interfaces that its users own; guard sees only those",
		},
		{Path: "internal/scope", May: []string{"breaker", "internal/circuit", "internal/crdt"}, Why: "how a fleet decides over breakers, whatever carries it, so it knows neither gossip nor a store"},
		{Path: "internal/scopetest", May: []string{"internal/scope", "breaker", "internal/circuit"}, Why: "one suite for every substrate of internal/scope, so it knows none of them"},
		{Path: "internal/adaptertest", May: []string{"guard"}, Why: "what the tests of adapters share, so it knows none of them"},
		{Path: "internal/registers", Why: "what the drivers of fleet/register share, so it knows none of them, nor the seam, which uses it too"},
		{Path: "internal/registertest", May: []string{"fleet/register", "internal/registers"}, Why: "one suite for every driver of fleet/register, so it knows none of them"},
		{Path: "internal/brokers", Why: "starts brokers for tests and programs, and knows nobody who uses them"},
	},

	Bans: []Ban{
		{
			Rooms: core, Deep: true, Tests: true,
			Imports: []string{
				"github.com/IBM/sarama/...", "github.com/rabbitmq/amqp091-go/...",
				"github.com/nats-io/...", "github.com/twmb/franz-go/...",
			},
			Why: "only an adapter touches a broker; whoever imports the core must not link a client they do not use",
		},
		{
			Rooms: []string{"guard", "guard/guardtest", "limiter", "breaker", "dlq", "dlq/redrive", "internal/circuit", "internal/storm", "internal/credit", "internal/quarantine", "internal/ringbuf", "internal/ringbuf/spill", "internal/crdt", "internal/escrow", "once", "once/bolt"},
			Imports: []string{
				"net", "net/http/...", "net/rpc/...", "os/exec",
			},
			Why: "the core opens no socket and starts no process, so that its tests run in a bubble and on virtual time",
		},
		{
			Rooms: linked, Deep: true,
			Imports: []string{
				"go.opentelemetry.io/otel/sdk/...", "go.opentelemetry.io/otel/exporters/...",
				"github.com/spf13/cobra/...", "github.com/nats-io/nats-server/...",
			},
			Why: "a library measures through the OTel API; SDK, flags and servers are chosen by the program",
		},
		{
			Rooms: linked, Except: []string{"guard/guardtest"}, Deep: true,
			Imports: []string{"testing/..."},
			Why:     "nothing that a user can link links the testing package; the one package made for users' tests is guard/guardtest",
		},
		{
			Rooms:   []string{"cmd/stormguard"},
			Imports: []string{"testing/..."},
			Why:     "the CLI needs virtual time for one simulation, which has a room of its own, and no other part of testing",
		},
		{
			Rooms:   linked,
			Imports: []string{"flag", "log", "expvar", "net/http/pprof"},
			Why:     "flags, the global logger and handlers registered by import belong to the program; a library takes a slog.Logger",
		},
		{
			Rooms: append([]string{"cmd/stormguard"}, linked...), Tests: true,
			Imports: []string{"C"},
			Why:     "everything builds with CGO_ENABLED=0 and cross-compiles",
		},
	},

	Homes: []Home{
		{Imports: "github.com/sony/gobreaker", Rooms: []string{"internal/circuit"}, Why: "states, generations and the half-open judgement of a breaker"},
		{
			Imports: "go.etcd.io/etcd", Rooms: append([]string{"breaker/etcd"}, programs...),
			Why: "the client of the authority; programs hand theirs to the register",
		},
		{
			Imports: "go.etcd.io/bbolt", Rooms: []string{"internal/ringbuf/spill", "once/bolt"},
			Why: "the first store of the durable hold, and the local store of marks: each has its own file and format",
		},
		{Imports: "github.com/felixge/httpsnoop", Rooms: []string{"adapters/nethttp"}, Why: "an http.ResponseWriter that is seen, with the optional methods of the one it wraps"},
		{Imports: "golang.org/x/term", Rooms: []string{"cmd/stormguard"}, Why: "whether an output is a terminal, and how wide"},
		{Imports: "golang.org/x/sys", Rooms: []string{"internal/gossip", "internal/statefile"}, Why: "a timer of the kernel's: the runtime's is late by up to half of the floor; and the time since the host booted"},
		{
			Imports: "github.com/redis/go-redis", Rooms: append([]string{"limiter/redis"}, programs...),
			Why: "the client of the store; programs hand theirs, with its addresses and secrets, to limiter/redis",
		},
		{
			Imports: "google.golang.org/grpc", Rooms: append([]string{"limiter/limitgrpc"}, programs...),
			Why: "the interceptors' types; programs hand them to their server",
		},
		{
			Imports: "github.com/jackc/pgx", Rooms: append([]string{"fleet/register/postgres", "once/postgres"}, programs...),
			Why: "the client of PostgreSQL; programs hand their pool to the register, and their transactions to once",
		},
		{Imports: "google.golang.org/genproto/googleapis/rpc", Rooms: []string{"limiter/limitgrpc"}, Why: "RetryInfo, the detail of a denial"},
		{Imports: "google.golang.org/protobuf", Rooms: []string{"limiter/limitgrpc"}, Why: "the duration in a RetryInfo"},
		{Imports: "github.com/hashicorp/memberlist", Rooms: []string{"internal/gossip"}, Why: "membership and reliable push and pull"},

		{
			Imports: "github.com/IBM/sarama", Tests: true, Rooms: append([]string{"adapters/kafka/..."}, programs...),
			Why: "the Kafka client; programs hand its types to the adapter",
		},
		{
			Imports: "github.com/rabbitmq/amqp091-go", Tests: true, Rooms: append([]string{"adapters/amqp"}, programs...),
			Why: "the RabbitMQ client; programs hand its types to the adapter",
		},
		{
			Imports: "github.com/nats-io/nats.go", Tests: true, Rooms: append([]string{"adapters/nats"}, programs...),
			Why: "the NATS client; programs hand its types to the adapter",
		},
		{
			Imports: "github.com/nats-io/nats-server", Tests: true, Rooms: append([]string{"internal/brokers"}, programs...),
			Why: "a broker inside the demo and the tests, so that they need no server; a library never starts one",
		},

		{
			Imports: "go.opentelemetry.io/otel", Tests: true,
			Rooms: append([]string{"guard/...", "adapters/...", "console", "fleet"}, programs...),
			Why:   "the OTel API: instruments in guard and fleet, trace headers in adapters; leaves report through their own hooks",
		},
		{
			Imports: "go.opentelemetry.io/otel/sdk", Tests: true, Rooms: programs,
			Why: "which SDK, and how often it exports, is the program's choice",
		},
		{
			Imports: "go.opentelemetry.io/otel/exporters", Tests: true, Rooms: programs,
			Why: "where telemetry goes is the program's choice",
		},

		{Imports: "github.com/spf13/cobra", Rooms: []string{"cmd/stormguard"}, Why: "the CLI's commands and flags"},
		{Imports: "github.com/spf13/pflag", Rooms: []string{"cmd/stormguard"}, Why: "the flag types that cobra takes"},
		{Imports: "golang.org/x/text", Rooms: []string{"cmd/stormguard"}, Why: "how wide a Chinese character is in a terminal"},
		{Imports: "go.yaml.in/yaml/v3", Rooms: []string{"cmd/stormguard"}, Why: "the file with settings of the CLI"},

		{Imports: "github.com/twmb/franz-go", Tests: true, Why: "kfake, a broker with faults on command, beside the real one in tests"},
		{Imports: "pgregory.net/rapid", Tests: true, Rooms: []string{"guard/guardtest"}, Why: "property tests"},
		{Imports: "github.com/anishathalye/porcupine", Tests: true, Rooms: []string{"guard/guardtest"}, Why: "linearizability checks in tests"},
		{Imports: "go.uber.org/goleak", Tests: true, Rooms: []string{"guard/guardtest", "internal/adaptertest"}, Why: "leak checks in each TestMain"},
	},
}
