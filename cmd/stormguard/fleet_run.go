// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

const fleetRunLong = `Run one process of a fleet: it shares a limit with the others, asks for --demand
messages a second of --key, and prints what it was granted each second. At --http it
serves the console: its page shows the fleet, the other fleet commands ask it, and
orders "--in fleet" go to all processes from there. To try a network, a set of keys or
a roster out before a consumer depends on it. With --demand 0 it is an operator's seat:
it takes no share.

--bind beyond loopback needs --keys ("stormguard fleet keygen" makes one).

--register says where the fleet's configuration is kept: its roster and limits, with a
number. --rate, --burst and --roster are written there if it is empty, and nothing
else. The key, bucket, topic or stream is stormguard-FLEET, and the row of
PostgreSQL FLEET. Without --register they are a static configuration of --number:
start all processes again with the next number to change it.

With --register a name that is not in --roster joins, with a share of the others' weight,
if it demands anything. An interrupt makes it leave: it gives its share to the others.`

// fleetRun holds the flags of the command fleet run.
type fleetRun struct {
	name, fleet, zone, region string
	roster, seeds             []string
	bind, http, network, keys string
	httpCert, httpKey         string
	httpTokens                string
	store                     registerFlags
	number                    uint64
	insecure                  bool
	key, strategy             string
	rate                      float64
	burst, demand             int
	quiet                     bool
}

func newFleetRun() *cobra.Command {
	var run fleetRun
	var ranges ranges
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run one process of a fleet, to try it",
		Long:  fleetRunLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := ranges.check()
			if run.name == "" {
				err = errors.Join(err, errors.New("--name: must be given"))
			}
			err = errors.Join(err, run.store.validate())
			if err != nil {
				return usageError{err}
			}
			return run.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&run.name, "name", "", "the process's name: stable over restarts, of one living process")
	f.StringVar(&run.fleet, "fleet", "trial", "the fleet's name")
	f.StringSliceVar(&run.roster, "roster", nil, "names of the first members, the same for all processes")
	f.StringSliceVar(&run.seeds, "seed", nil, "host:port of processes to ask")
	f.StringVar(&run.bind, "bind", "127.0.0.1:0", "host:port to listen on, UDP and TCP")
	f.BoolVar(&run.insecure, "insecure", false, "allow --bind beyond loopback without --keys: whoever reaches the port can change the fleet")
	f.StringVar(&run.http, "http", "", "host:port to serve the console on; none if empty. Beyond loopback it needs the next three")
	f.StringVar(&run.httpTokens, "http-tokens", "", "`file` with one NAME SECRET a line: the tokens that are let in")
	f.StringVar(&run.httpCert, "http-cert", "", "PEM `file` of the console's certificate, with --http-key")
	f.StringVar(&run.httpKey, "http-key", "", "PEM `file` of its private key")
	f.StringVar(&run.network, "network", "udp", "udp, or tcp where UDP is dropped")
	f.StringVar(&run.keys, "keys", "", "a file with one base64 key of 32 bytes a line; the first encrypts, all are read")
	run.store.bind(&ranges, f)
	f.Uint64Var(&run.number, "number", 0, "without --register: of --rate, --burst and --roster; raise it by one with each change")
	f.StringVar(&run.zone, "zone", "", "where it runs")
	f.StringVar(&run.region, "region", "", "where that is")
	f.Float64Var(&run.rate, "rate", 1000, "of the first limit: tokens per second, of the whole fleet")
	f.IntVar(&run.burst, "burst", 100, "of the first limit: tokens, of the whole fleet")
	f.StringVar(&run.strategy, "strategy", string(fleet.Escrow), "how the processes share the limit: escrow, which is strict, or pooled")
	f.StringVar(&run.key, "key", "trial", "the key to ask for")
	run.demand = 100
	ranges.number(f, &run.demand, "demand", 0, 1_000_000, "messages a second to ask for")
	f.BoolVar(&run.quiet, "quiet", false, "print no line each second")
	return cmd
}

func (r *fleetRun) config() fleet.Config {
	c := fleet.Config{
		Fleet: r.fleet, Name: r.name, Number: r.number, Program: programVersion(),
		Limits: fleet.Limits{
			Limit: limiter.Limit{Rate: r.rate, Burst: r.burst}, Strategy: fleet.Strategy(r.strategy), Roster: fleet.Roster{Learners: true},
		},
		Gossip: fleet.Gossip{
			Bind: r.bind, Insecure: r.insecure, Network: r.network, Seeds: r.seeds, Zone: r.zone, Region: r.region,
		},
	}
	for _, n := range r.roster {
		c.Limits.Roster.Members = append(c.Limits.Roster.Members, fleet.Share{Name: n})
	}
	return c
}

func (r *fleetRun) run(ctx context.Context, stdout, stderr io.Writer) error {
	log := slog.New(slog.NewTextHandler(stderr, nil))
	opts := []fleet.Option{fleet.WithLogger(log)}
	if r.store.url != "" {
		store, closes, err := r.store.open(ctx, r.fleet, stderr)
		if err != nil {
			return err
		}
		defer closes()
		opts = append(opts, fleet.WithRegister(store))
	}
	if r.keys != "" {
		ring, err := readKeys(r.keys)
		if err != nil {
			return usageError{err}
		}
		opts = append(opts, fleet.WithKeyring(ring))
	}
	p, err := fleet.Start(r.config(), opts...)
	if errors.Is(err, fleet.ErrConfig) {
		return usageError{err}
	}
	if err != nil {
		return err
	}
	defer p.Close()
	if addr := p.Addr(); addr.IsValid() {
		fmt.Fprintf(stdout, "%s listens on %s\n", r.name, addr)
	}
	if r.http != "" {
		stop, err := r.serve(ctx, p, log, stdout, stderr)
		if err != nil {
			return err
		}
		defer stop()
	}
	work, stop := context.WithCancel(ctx)
	defer stop()
	joined := make(chan error, 1)
	go func() { joined <- r.join(work, p) }()
	err = r.ask(work, p, stdout)
	stop()
	if e := <-joined; e != nil && ctx.Err() == nil {
		return e
	}
	fmt.Fprintf(stdout, "%s leaves\n", r.name)
	away, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if e := p.Leave(away); e != nil {
		fmt.Fprintf(stderr, "stormguard: leave: %v\n", e)
	}
	return err
}

// serve serves the console until stop is called. The console's guard has no source; it has the
// fleet's quarantine.
func (r *fleetRun) serve(ctx context.Context, p *fleet.Process, log *slog.Logger, stdout, stderr io.Writer) (stop func(), err error) {
	seat := console.Config{Process: r.name, Fleet: p.Orders()}
	if r.httpTokens != "" {
		tokens, err := readTokens("--http-tokens", r.httpTokens)
		if err != nil {
			return nil, usageError{err}
		}
		for _, t := range tokens {
			seat.Tokens = append(seat.Tokens, console.Token(t))
		}
	}
	tlsConfig := &tls.Config{MinVersion: tls.VersionTLS12}
	secure := r.httpCert != "" || r.httpKey != ""
	if secure {
		cert, err := tls.LoadX509KeyPair(r.httpCert, r.httpKey)
		if err != nil {
			return nil, usageError{fmt.Errorf("--http-cert, --http-key: %w", err)}
		}
		tlsConfig.Certificates = []tls.Certificate{cert}
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", r.http)
	if err != nil {
		return nil, fmt.Errorf("--http: %w", err)
	}
	at, _ := netip.ParseAddrPort(ln.Addr().String())
	if !at.Addr().Unmap().IsLoopback() && (!secure || seat.Tokens == nil) {
		_ = ln.Close()
		return nil, usageError{fmt.Errorf("--http %q: is not a loopback address: give --http-tokens, --http-cert and --http-key", r.http)}
	}
	g, err := guard.New(guard.Config{Group: r.fleet}, guard.WithLogger(log), guard.WithQuarantine(p.Quarantine()))
	if err != nil {
		_ = ln.Close()
		return nil, usageError{fmt.Errorf("--fleet: %w", err)}
	}
	page, err := console.New(seat, g)
	if err != nil {
		_ = ln.Close()
		_, _ = g.Close(ctx)
		return nil, usageError{fmt.Errorf("--http-tokens: %w", err)}
	}
	server := &http.Server{
		Handler: page, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10, TLSConfig: tlsConfig,
	}
	served := make(chan error, 1)
	scheme, serve := "http", server.Serve
	if secure {
		scheme, serve = "https", func(l net.Listener) error { return server.ServeTLS(l, "", "") }
	}
	fmt.Fprintf(stdout, "%s answers at %s://%s\n", r.name, scheme, ln.Addr())
	go func() { served <- serve(ln) }() // ends with Close
	return func() {
		_ = server.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			fmt.Fprintf(stderr, "stormguard: --http: %v\n", err)
		}
		page.Close()
		_, _ = g.Close(context.WithoutCancel(ctx)) // g has no source to wait for
	}, nil
}

// join asks for a share, if the process demands anything and is not in --roster. Without
// --register or --roster it does nothing.
func (r *fleetRun) join(ctx context.Context, p *fleet.Process) error {
	if r.demand == 0 || len(r.roster) == 0 || r.store.url == "" || slices.Contains(r.roster, r.name) {
		return nil
	}
	return p.Join(ctx, 1)
}

// ask asks for messages at the demanded rate until ctx ends, and prints each second what was
// granted.
func (r *fleetRun) ask(ctx context.Context, p *fleet.Process, w io.Writer) error {
	limit := p.Key(r.key)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	begun := time.Now()
	asked, granted, told, said := 0, 0, 0, begun
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		now := time.Now()
		for due := int(now.Sub(begun).Seconds() * float64(r.demand)); asked < due; asked++ {
			if limit.Allow() {
				granted++
			}
		}
		if now.Sub(said) >= time.Second {
			if !r.quiet {
				number, share := seen(p.Status())
				fmt.Fprintf(w, "%s granted %.0f/s of %d/s, share %.1f %%, configuration %d\n", r.name, float64(granted-told)/now.Sub(said).Seconds(), r.demand, 100*share, number)
			}
			told, said = granted, now
		}
	}
}

// seen returns the number of the newest configuration, and the share of the process that made
// the status.
func seen(s fleet.Status) (number uint64, share float64) {
	for _, m := range s.Members {
		if m.Name == s.Name {
			share = m.Share
		}
	}
	return s.Configuration.Number, share
}

// readKeys reads a keyring: one base64 key per line; # begins a comment.
func readKeys(path string) (*fleet.Keyring, error) {
	f, err := os.Open(path) //nolint:gosec // the operator's own
	if err != nil {
		return nil, fmt.Errorf("--keys: %w", err)
	}
	defer func() { _ = f.Close() }()
	var keys [][]byte
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		text, _, _ := strings.Cut(lines.Text(), "#")
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("--keys %s: line %d is not base64", path, n)
		}
		keys = append(keys, key)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("--keys: %w", err)
	}
	ring, err := fleet.NewKeyring(keys...)
	if err != nil {
		return nil, fmt.Errorf("--keys %s: %w", path, err)
	}
	return ring, nil
}
