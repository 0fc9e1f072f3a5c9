// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Notifier is a [Section] that reports its own changes, not those that the session merged. A
// [Node] subscribes when it starts. The Node looks at other sections with each keep-alive, and
// after [Node.Kick].
type Notifier interface {
	// OnChange has f called after each change, from any goroutine; nil ends that. f does not wait,
	// allocate or call back, so it may be called with the section's lock held.
	OnChange(f func())
}

// Node is a live [Session] with its sockets, timer and membership. It is safe for concurrent use.
// But a section must not call its Node from within Mark, Delta, Merge or Gone, except for Kick: the
// Node waits for the section there.
//
// One goroutine owns the session and steps it. Others read the sockets, write streams, look for
// processes, and log membership. All of them end with [Node.Close]. memberlist has about ten
// goroutines of its own. They end then too, except a probe that is under way: it sends nothing and
// is over within 2 s.
type Node struct {
	cfg       NodeConfig
	log       *slog.Logger
	clock     func() time.Duration
	sections  []section
	discovery []Discovery
	t         *transport
	ml        *memberlist.Memberlist
	members   *members

	kicked atomic.Bool // Kick was called since the session last looked at all marks
	kick   chan struct{}
	calls  chan func()
	hints  hints

	discoveryErr atomic.Pointer[error]

	ctx    context.Context //nolint:containedctx // the node's lifetime, which Close ends
	cancel context.CancelFunc
	wg     sync.WaitGroup
	owned  chan struct{} // closed when own has ended
	left   chan struct{} // closed when all peers that are heard know that we leave
	done   chan struct{} // closed when everything has ended

	closing sync.Once
	leaving sync.Mutex // held while memberlist leaves or ends

	// The session belongs to the goroutine own. After own has ended, mu guards it.
	mu      sync.Mutex
	session *Session
	actions []Action
	err     error // guarded by errMu
	errMu   sync.Mutex
}

// hints are addresses on their way to the session.
type hints struct {
	mu    sync.Mutex
	addrs []netip.AddrPort
}

const maxHints = 4096

// Errors of a Node.
var (
	// ErrClosed says that a Node has been closed.
	ErrClosed = errClosed

	// ErrDisplaced says that a later incarnation of the Node's name runs, or that a peer gave this
	// incarnation up for newcomers; see [Config.MaxPeers].
	ErrDisplaced = errors.New("gossip: displaced by a later incarnation, or given up by a peer")

	// ErrUnacknowledged says that not all peers that were heard acknowledged a departure.
	ErrUnacknowledged = errors.New("gossip: left before all had acknowledged it")
)

// Start listens and begins to gossip. It does not wait until a peer is met. The sections are those
// of [WithSection]. The error is everything that [NodeConfig.Validate] and the options find, or an
// error of listening or membership.
//
// Call [Node.Leave] or [Node.Close] in the end.
func Start(cfg NodeConfig, opts ...Option) (*Node, error) {
	o, optErr := buildOptions(opts)
	if err := errors.Join(cfg.Validate(), cfg.closed(o.node.keys != nil), optErr, o.collaborators()); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	session := cfg.Config
	if o.node.keys != nil {
		session.MaxPacket = max(min(session.MaxPacket, MaxPacket-overhead), 512)
	}
	s, err := New(session, opts...)
	if err != nil {
		return nil, err
	}
	bind, _ := parseBind(cfg.Bind) // Validate has checked it
	ln, udp, err := listen(bind, cfg.Network)
	if err != nil {
		return nil, fmt.Errorf("gossip: listen: %w", err)
	}
	n := &Node{
		cfg:      cfg,
		log:      o.node.log,
		clock:    o.node.clock,
		sections: o.sections,
		kick:     make(chan struct{}, 1),
		calls:    make(chan func()),
		owned:    make(chan struct{}),
		left:     make(chan struct{}),
		done:     make(chan struct{}),
		session:  s,
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.discovery = discoveries(cfg, o.node)
	n.t = n.newTransport(ln, udp, o.node)
	n.members = &members{
		meta:  makeMeta(Member{Replica: cfg.Self, Zone: cfg.Zone, Region: cfg.Region}),
		limit: 4 * cfg.MaxPeers,
		hint:  func(a netip.AddrPort) { n.hint(a) },
		log:   newScribe(n.log),
		known: map[string]Member{},
	}
	if n.ml, err = newMemberlist(n.t, n.members, cfg.Self); err != nil {
		n.cancel()
		n.t.close()
		return nil, fmt.Errorf("gossip: membership: %w", err)
	}
	n.t.start()
	n.wg.Go(n.own)
	n.wg.Go(n.rejoin)
	n.wg.Go(func() { n.members.log.write(n.ctx) })
	for _, sec := range n.sections {
		if c, ok := sec.Section.(Notifier); ok {
			c.OnChange(n.Kick)
		}
	}
	return n, nil
}

func discoveries(cfg NodeConfig, o nodeOptions) []Discovery {
	all := o.discovery
	if len(cfg.Seeds) > 0 {
		all = append(all, Seeds(o.resolver, cfg.Seeds...))
	}
	if cfg.DNS != "" {
		all = append(all, DNS(o.resolver, cfg.DNS))
	}
	if cfg.File != "" {
		all = append(all, File(o.resolver, cfg.File))
	}
	return all
}

func (n *Node) newTransport(ln *net.TCPListener, udp *net.UDPConn, o nodeOptions) *transport {
	bound := ln.Addr().(*net.TCPAddr).AddrPort() //nolint:forcetypeassert // of a TCPListener
	self := canonical(bound)
	told := netip.AddrPortFrom(netip.Addr{}, bound.Port())
	if n.cfg.Advertise != "" {
		self = canonical(netip.MustParseAddrPort(n.cfg.Advertise)) // Validate has checked it
		told = self
	} else if self.Addr().IsUnspecified() {
		self = netip.AddrPortFrom(ownAddr(), bound.Port())
	}
	t := &transport{
		cluster: n.session.cluster,
		self:    self,
		told:    told,
		udp:     udp,
		ln:      ln,
		faults:  o.faults,
		inbox:   make(chan *datagram, 1024),
		limit:   4*n.cfg.MaxPeers + 64,
		room:    n.cfg.MaxPeers + 128,
		packets: make(chan *memberlist.Packet, 256),
		streams: make(chan net.Conn),
		nodes:   2 * 4 * n.cfg.MaxPeers, // membership remembers dead members for a while
		outs:    map[netip.AddrPort]*outStream{},
		conns:   map[net.Conn]struct{}{},
	}
	if o.keys != nil {
		t.seal = newSealer(o.keys, 4*n.cfg.MaxPeers)
	}
	if a := bound.Addr().Unmap(); n.cfg.Advertise == "" && !a.IsUnspecified() {
		t.from = a
	}
	t.ctx, t.cancel = context.WithCancel(n.ctx)
	return t
}

// Self is the name and the present incarnation of this process. The incarnation is higher than the
// configured one if the process had to go above another one of its name.
func (n *Node) Self() (self crdt.Replica) {
	n.call(func() { self = n.session.Self() })
	return self
}

// Addr is where others reach this node.
func (n *Node) Addr() netip.AddrPort { return n.t.self }

// Done is closed when the node has ended: by Close, by Leave, or because it was
// displaced.
func (n *Node) Done() <-chan struct{} { return n.done }

// Err says why the node ended: [ErrDisplaced] or [ErrClosed], or nil while it runs.
func (n *Node) Err() error {
	n.errMu.Lock()
	defer n.errMu.Unlock()
	return n.err
}

func (n *Node) setErr(err error) {
	n.errMu.Lock()
	defer n.errMu.Unlock()
	if n.err == nil {
		n.err = err
	}
}

// Kick says that a section has changed. It does not wait and allocates nothing. While an earlier
// kick is pending it costs one atomic operation. So call it after every change; any lock may be
// held. A section that is a [Notifier] calls it by itself.
func (n *Node) Kick() {
	if n.kicked.Load() || n.kicked.Swap(true) {
		return
	}
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// hint has the session try addresses. It does not wait.
func (n *Node) hint(addrs ...netip.AddrPort) {
	if len(addrs) == 0 {
		return
	}
	n.hints.mu.Lock()
	if len(n.hints.addrs) < maxHints {
		n.hints.addrs = append(n.hints.addrs, addrs...)
	}
	n.hints.mu.Unlock()
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// own is the goroutine that owns the session.
//
// No kick is lost. Kick is called after the change. If Kick finds the flag set, own clears the flag
// later, and step reads the Marks after that. If not, Kick leaves a token in the channel. While the
// flag is set and the floor keeps the session from looking, the node wakes at the floor.
func (n *Node) own() {
	defer close(n.owned)
	alarm := newAlarm()
	defer alarm.close()
	armed := Never
	for {
		// An alarm that is set too early rings once without need. That is cheaper than stopping it.
		if wake := n.wake(); wake < armed {
			armed = wake
			alarm.set(wake - n.clock())
		}
		select {
		case <-n.ctx.Done():
			return
		case d := <-n.t.inbox:
			n.receive(d)
		case <-alarm.rings():
			armed = Never
		case <-n.kick:
			n.takeHints()
		case f := <-n.calls:
			f()
		}
		n.drain()
		if n.clock() >= n.wake() {
			n.kicked.Store(false)
			n.step(Event{Kind: Wake})
		}
		if n.session.over {
			n.end()
		}
	}
}

// drain takes in packets that have come meanwhile, 64 at most, so that a flood does not delay the
// timer.
func (n *Node) drain() {
	for range 64 {
		select {
		case d := <-n.t.inbox:
			n.receive(d)
		default:
			return
		}
	}
}

func (n *Node) wake() time.Duration {
	wake := n.session.Wake()
	if n.kicked.Load() {
		wake = min(wake, n.session.floorAt)
	}
	return wake
}

func (n *Node) receive(d *datagram) {
	n.step(Event{Kind: Packet, Addr: d.addr, Packet: d.b})
	d.free()
}

// step steps the session and carries out its actions.
func (n *Node) step(ev Event) {
	ev.Wall = time.Now().UnixNano()
	n.actions = n.session.Step(n.clock(), ev, n.actions[:0])
	for i := range n.actions {
		switch a := &n.actions[i]; a.Kind {
		case Send:
			n.t.send(a.Packet, a.Addr)
		case Displaced:
			n.setErr(fmt.Errorf("%w: %v", ErrDisplaced, a.By))
			n.log.Error("gossip: displaced", "self", n.cfg.Self.String(), "by", a.By.String())
		case Rejoined:
			n.log.Warn("gossip: a higher incarnation of this name was known; this process goes on above it. If its clock is right, look for a second process of the name",
				"self", a.By.String(), "was", n.cfg.Self.String())
		case Left:
			close(n.left)
		}
	}
}

// end closes a node that was displaced.
func (n *Node) end() {
	select {
	case <-n.left:
		return // Leave closes it
	default:
	}
	go func() { _ = n.Close() }() // Close waits for own, which is this goroutine
	<-n.ctx.Done()
}

func (n *Node) takeHints() {
	n.hints.mu.Lock()
	addrs := n.hints.addrs
	n.hints.addrs = nil
	n.hints.mu.Unlock()
	for _, a := range addrs {
		n.step(Event{Kind: Hint, Addr: a})
	}
}

// call runs f on the goroutine own, or here once own has ended.
func (n *Node) call(f func()) {
	ran := make(chan struct{})
	select {
	case n.calls <- func() { defer close(ran); f() }:
		<-ran
	case <-n.owned:
		n.mu.Lock()
		defer n.mu.Unlock()
		f()
	}
}

// Peers returns every peer, nearby peers first, then by name. After Close it returns the final
// state.
func (n *Node) Peers() (peers []Peer) {
	n.call(func() { peers = n.session.Peers(n.clock(), nil) })
	return peers
}

// Members returns the processes that membership believes to be there, this one included, by name. A
// process that died is still among them for some seconds.
func (n *Node) Members() []Member { return n.members.list() }

// flushTime is the longest time that Leave waits until peers have acknowledged the latest changes.
const flushTime = time.Second

// Leave ends the node in order. First it waits up to a second until all peers that are heard have
// acknowledged all changes. Then it tells them that this incarnation is over, until all have
// acknowledged that; their sections are told Gone at once. At last it closes the node, in any case.
//
// When ctx ends, Leave skips the rest and returns [ErrUnacknowledged]. If the node was displaced or
// closed before, it returns that error. The caller must first empty a section that needs it, such
// as a limiter that has lent.
func (n *Node) Leave(ctx context.Context) error {
	defer func() { _ = n.Close() }()
	flush, cancel := context.WithTimeout(ctx, flushTime)
	for n.ctx.Err() == nil && n.behind() {
		if !pause(flush, 5*time.Millisecond) {
			break
		}
	}
	cancel()
	n.call(func() {
		if n.ctx.Err() == nil {
			n.step(Event{Kind: Leave})
		}
	})
	var err error
	select {
	case <-n.left:
	case <-ctx.Done():
		err = fmt.Errorf("%w: %w", ErrUnacknowledged, context.Cause(ctx))
	case <-n.ctx.Done():
		err = n.Err()
	}
	n.leaving.Lock()
	defer n.leaving.Unlock()
	if n.ctx.Err() == nil {
		limit := 500 * time.Millisecond
		if until, ok := ctx.Deadline(); ok {
			limit = min(limit, max(time.Until(until), time.Millisecond))
		}
		_ = n.ml.Leave(limit) // a hint to the others: an error does not matter
	}
	return err
}

// behind reports whether a fresh peer has not acknowledged a change.
func (n *Node) behind() (behind bool) {
	n.call(func() {
		now := n.clock()
		for _, p := range n.session.peers {
			behind = behind || n.session.state(now, p) == Fresh && p.met && n.session.unacked(p) > 0
		}
	})
	return behind
}

// Close ends the node at once and returns when its goroutines have ended. Nothing is sent after
// that. To the others this incarnation falls silent; see Leave. Close may be called more than once.
// A section must not call it from within a call of the session.
func (n *Node) Close() error {
	n.closing.Do(func() {
		n.setErr(ErrClosed)
		for _, sec := range n.sections {
			if c, ok := sec.Section.(Notifier); ok {
				c.OnChange(nil)
			}
		}
		n.cancel()
		n.leaving.Lock()
		_ = n.ml.Shutdown()
		n.leaving.Unlock()
		n.t.close()
		n.wg.Wait()
		close(n.done)
	})
	<-n.done
	return nil
}
