// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package importrule

import (
	"slices"
	"strings"
	"testing"
)

// Each made-up module shows that the rules can fail, and at what. A line of
// want is "package import", and "?" when only test files import it.
func TestOurs(t *testing.T) {
	t.Parallel()

	const (
		breakerLib = "github.com/sony/gobreaker/v2"
		jetstream  = "github.com/nats-io/nats.go/jetstream"
		natsServer = "github.com/nats-io/nats-server/v2/server"
		otelMetric = "go.opentelemetry.io/otel/metric"
		otelSDK    = "go.opentelemetry.io/otel/sdk/metric"
	)
	in := func(room string) string { return Module + "/" + room }
	imports := func(room string, imports ...string) Package {
		return Package{ImportPath: in(room), Imports: imports}
	}
	tests := func(room string, imports ...string) Package {
		return Package{ImportPath: in(room), TestImports: imports}
	}

	for _, tt := range []struct {
		name string
		pkgs []Package
		want []string
	}{
		{"the module as designed", []Package{
			imports("cmd/stormguard", "flag", in("adapters/nats"), in("guard"), natsServer, otelSDK, "github.com/spf13/cobra"),
			imports("examples/orders", in("guard"), in("adapters/nats"), jetstream),
			imports("adapters/nats", "net", in("guard"), in("dlq"), jetstream, otelMetric),
			imports("guard", "log/slog", in("breaker"), in("dlq"), in("limiter"), in("internal/ringbuf"), otelMetric),
			imports("guard/guardtest", "testing", in("guard"), "pgregory.net/rapid"),
			imports("limiter", in("internal/escrow")),
			imports("fleet", in("internal/fleetstate"), in("limiter"), in("breaker"), in("dlq")),
			imports("internal/gossip", "net", in("internal/crdt"), "github.com/hashicorp/memberlist"),
			imports("internal/circuit", "time", breakerLib),
			imports("dlq/archive/sqlite", in("dlq"), in("dlq/archive")),
			imports("dlq/redrive", in("dlq")),
			imports("internal/ringbuf/spill", in("internal/ringbuf"), "go.etcd.io/bbolt"),
		}, nil},
		{"a package may import its own parts", []Package{
			imports("guard", in("guard/internal/sweep")), imports("guard/internal/sweep", in("guard")),
		}, nil},
		{"tests may use the test libraries and the conformance suite", []Package{
			tests("internal/ringbuf", "testing", "pgregory.net/rapid", "go.uber.org/goleak", "github.com/anishathalye/porcupine"),
			{ImportPath: in("adapters/kafka"), XTestImports: []string{in("adapters/kafka"), in("guard/guardtest"), jetstream, natsServer, otelSDK}},
		}, nil},

		{"a package without a room", []Package{imports("util", "fmt")}, []string{"util (anything)"}},
		{"the module's root", []Package{{ImportPath: Module}}, []string{" (anything)"}},
		{"a prefix is not a room", []Package{imports("ringbuffer")}, []string{"ringbuffer (anything)"}},

		{"a leaf imports a leaf", []Package{imports("dlq", in("internal/ringbuf"))}, []string{"dlq internal/ringbuf"}},
		{"a leaf imports the guard", []Package{imports("breaker", in("guard"))}, []string{"breaker guard"}},
		{"a leaf's test imports the guard", []Package{tests("internal/ringbuf", in("guard"))}, []string{"internal/ringbuf guard ?"}},
		{"a leaf imports its own room's child", []Package{imports("internal/ringbuf", in("internal/ringbuf/spill"))}, []string{"internal/ringbuf internal/ringbuf/spill"}},
		{"the guard imports an adapter", []Package{imports("guard", in("adapters/nats"))}, []string{"guard adapters/nats"}},
		{"the guard imports the fleet", []Package{imports("guard", in("fleet"))}, []string{"guard fleet"}},
		{"an adapter imports an adapter", []Package{imports("adapters/amqp", in("adapters/kafka"))}, []string{"adapters/amqp adapters/kafka"}},
		{"the HTTP intake imports the breaker", []Package{imports("adapters/nethttp", in("breaker"))}, []string{"adapters/nethttp breaker"}},
		{"an archive imports an archive", []Package{imports("dlq/archive/sqlite", in("dlq/archive/postgres"))}, []string{"dlq/archive/sqlite dlq/archive/postgres"}},
		{"the console imports the breaker", []Package{imports("console", in("breaker"))}, []string{"console breaker"}},
		{"something imports an example", []Package{imports("cmd/stormguard", in("examples/orders"))}, []string{"cmd/stormguard examples/orders"}},
		{"something imports chaos", []Package{imports("examples/orders", in("chaos"))}, []string{"examples/orders chaos"}},
		{"something imports bench", []Package{imports("chaos", in("bench"))}, []string{"chaos bench"}},
		{"shipped code imports the conformance suite", []Package{imports("adapters/nats", in("guard/guardtest"))}, []string{"adapters/nats guard/guardtest"}},

		{"a library nobody knows", []Package{imports("dlq", "github.com/pkg/errors")}, []string{"dlq github.com/pkg/errors"}},
		{"a library nobody knows, in a test", []Package{tests("dlq", "github.com/stretchr/testify/require")}, []string{"dlq github.com/stretchr/testify/require ?"}},
		{"gobreaker away from home", []Package{imports("limiter", breakerLib), tests("limiter", breakerLib)}, []string{"limiter " + breakerLib, "limiter " + breakerLib + " ?"}},
		{"memberlist away from home", []Package{imports("fleet", "github.com/hashicorp/memberlist")}, []string{"fleet github.com/hashicorp/memberlist"}},
		{"another broker's client in an adapter", []Package{imports("adapters/kafka", jetstream)}, []string{"adapters/kafka " + jetstream}},
		{"a server in an adapter", []Package{imports("adapters/nats", natsServer)}, []string{"adapters/nats " + natsServer, "adapters/nats " + natsServer}},
		{"OTel in a leaf", []Package{imports("dlq", otelMetric)}, []string{"dlq " + otelMetric}},
		{"a part of a library with another home", []Package{imports("guard", otelSDK)}, []string{"guard " + otelSDK, "guard " + otelSDK}},
		{"rapid outside tests", []Package{imports("internal/ringbuf", "pgregory.net/rapid")}, []string{"internal/ringbuf pgregory.net/rapid"}},
		{"cobra in a library", []Package{imports("console", "github.com/spf13/cobra")}, []string{"console github.com/spf13/cobra", "console github.com/spf13/cobra"}},

		{"a broker in a leaf's test", []Package{tests("dlq", jetstream)}, []string{"dlq " + jetstream + " ?"}},
		{"a socket in the core", []Package{imports("guard", "net/http")}, []string{"guard net/http"}},
		{"testing in shipped code", []Package{imports("limiter", "testing/iotest")}, []string{"limiter testing/iotest"}},
		{"flags in a library", []Package{imports("adapters/nats", "flag", "log")}, []string{"adapters/nats flag", "adapters/nats log"}},
		{"cgo", []Package{imports("internal/ringbuf/spill", "C")}, []string{"internal/ringbuf/spill C"}},

		{"a broker at a distance", []Package{
			imports("internal/circuit", breakerLib),
			{ImportPath: breakerLib, Imports: []string{"fmt", "example.org/store"}},
			{ImportPath: "example.org/store", Imports: []string{jetstream}},
			{ImportPath: jetstream, Imports: []string{"github.com/nats-io/nats.go"}},
		}, []string{"internal/circuit " + jetstream + " via " + breakerLib + ", example.org/store"}},
		{"the SDK at a distance", []Package{
			imports("adapters/nats", jetstream),
			{ImportPath: jetstream, Imports: []string{otelSDK}},
		}, []string{"adapters/nats " + otelSDK + " via " + jetstream}},
		{"testing at a distance", []Package{
			imports("internal/gossip", "github.com/hashicorp/memberlist"),
			{ImportPath: "github.com/hashicorp/memberlist", Imports: []string{"testing"}},
		}, []string{"internal/gossip testing via github.com/hashicorp/memberlist"}},
		{"testing in the CLI", []Package{
			imports("cmd/stormguard", "testing", in("cmd/stormguard/internal/liveness")),
			imports("cmd/stormguard/internal/liveness", "testing", "testing/synctest", in("guard")),
		}, []string{"cmd/stormguard testing"}},
		{"a socket at a distance is the library's own", []Package{
			imports("guard", otelMetric),
			{ImportPath: otelMetric, Imports: []string{"net/http"}},
		}, nil},
		{"code and tests that make one mistake make it once", []Package{{
			ImportPath:   in("dlq"),
			Imports:      []string{in("internal/ringbuf")},
			TestImports:  []string{in("internal/ringbuf"), in("guard")},
			XTestImports: []string{in("dlq"), in("guard")},
		}}, []string{"dlq guard ?", "dlq internal/ringbuf"}},
		{"at a distance and back is no loop", []Package{
			imports("internal/circuit", breakerLib),
			{ImportPath: breakerLib, Imports: []string{breakerLib}},
		}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for _, v := range Ours.Check(tt.pkgs) {
				short := func(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, Module), "/") }
				s := short(v.Package) + " " + short(v.Import)
				if v.Test {
					s += " ?"
				}
				if len(v.Chain) > 2 {
					s += " via " + strings.Join(v.Chain[1:len(v.Chain)-1], ", ")
				}
				if v.Reason == "" || v.Remedy == "" {
					t.Errorf("%s: no reason or no remedy", s)
				}
				got = append(got, s)
			}
			slices.Sort(got)
			slices.Sort(tt.want)
			if !slices.Equal(got, tt.want) {
				t.Errorf("refused %q\nwant    %q", got, tt.want)
			}
		})
	}
}

func TestViolationSaysWhatToDo(t *testing.T) {
	t.Parallel()
	got := Ours.Check([]Package{{ImportPath: Module + "/dlq", Imports: []string{"github.com/pkg/errors"}}})
	if len(got) != 1 {
		t.Fatalf("%d violations, want 1", len(got))
	}
	want := Module + "/dlq imports github.com/pkg/errors\n" +
		"\tno rule knows this library\n" +
		"\ta new library: add a line to Homes in internal/importrule/rules.go with its one home and the reason for needing it"
	if got[0].String() != want {
		t.Errorf("message:\n%s\nwant:\n%s", got[0], want)
	}
}

// A line without a reason, or about a room that is not in the table, is a line
// that nobody can judge.
func TestEveryLineHasAReasonAndARoom(t *testing.T) {
	t.Parallel()
	known := func(line string, patterns []string) {
		for _, p := range patterns {
			if !slices.ContainsFunc(Ours.Rooms, func(r Room) bool { return matchesAny([]string{p}, r.Path) }) {
				t.Errorf("%s names %q, which no room matches", line, p)
			}
		}
	}
	for _, r := range Ours.Rooms {
		if r.Why == "" {
			t.Errorf("room %s has no reason", r.Path)
		}
		known("room "+r.Path, slices.Concat(r.May, r.MayTest))
	}
	for _, b := range Ours.Bans {
		if b.Why == "" {
			t.Errorf("ban on %v has no reason", b.Imports)
		}
		known("ban on "+b.Imports[0], slices.Concat(b.Rooms, b.Except))
	}
	for _, h := range Ours.Homes {
		if h.Why == "" {
			t.Errorf("home of %s has no reason", h.Imports)
		}
		known("home of "+h.Imports, h.Rooms)
	}
}
