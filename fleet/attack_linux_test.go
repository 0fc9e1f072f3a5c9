// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/limiter"
)

func fnv32(s string) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s))
	return h.Sum32()
}

// An attacker knows the format of packets and whatever travels unencrypted, and has
// a socket of its own.
type attacker struct {
	t       *testing.T
	fleet   string
	conn    *net.UDPConn
	victims []*Process
	sent    atomic.Uint64
}

func (a *attacker) throw(b []byte, at *Process) {
	if _, err := a.conn.WriteToUDPAddrPort(b, at.Addr()); err == nil {
		a.sent.Add(1)
	}
}

// forged is the header of a session packet.
type forged struct {
	flags              byte
	name               string
	inc, toInc         uint64
	toName             string
	seq, ack           uint64
	sent, echo, echoed uint64
}

func (a *attacker) packet(f forged, blocks ...[]byte) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32([]byte{0xC1, f.flags}, fnv32(a.fleet))
	b = append(append(b, byte(len(f.name))), f.name...)
	b = le.AppendUint64(le.AppendUint64(b, f.inc), f.toInc)
	b = le.AppendUint32(b, fnv32(f.toName))
	b = binary.AppendUvarint(binary.AppendUvarint(b, f.seq), f.ack)
	if f.ack != 0 {
		b = binary.AppendUvarint(b, ^uint64(1))
	}
	b = binary.AppendUvarint(binary.AppendUvarint(b, f.sent), f.echo)
	if f.echo != 0 {
		b = binary.AppendUvarint(b, f.echoed)
	}
	b = append(b, 0)
	for _, block := range blocks {
		b = append(b, block...)
	}
	return b
}

func block(section string, content []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, fnv32(section))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(content)))
	return append(b, content...)
}

// heard is what an answer of a process tells a stranger.
type heard struct {
	inc, seq, sent uint64
	config         [4]byte
	known          bool // config is
}

// listen reads one answer.
func (a *attacker) listen() (h heard, ok bool) {
	var raw [2048]byte
	_ = a.conn.SetReadDeadline(time.Now().Add(time.Second))
	n, _, err := a.conn.ReadFromUDPAddrPort(raw[:])
	if err != nil || n < 8 || raw[0] != 0xC1 {
		return h, false
	}
	b := raw[7+int(raw[6]) : n]
	le := binary.LittleEndian
	h.inc = le.Uint64(b)
	b = b[20:]
	uvarint := func() uint64 {
		v, n := binary.Uvarint(b)
		b = b[n:]
		return v
	}
	h.seq = uvarint()
	if ack := uvarint(); ack != 0 {
		uvarint()
	}
	h.sent = uvarint()
	if echo := uvarint(); echo != 0 {
		uvarint()
	}
	if raw[1]&4 != 0 { // a wall clock
		b = b[8:]
	}
	if raw[1]&32 != 0 { // a rest
		uvarint()
	}
	b = b[1+12*int(b[0]):]
	for len(b) >= 6 {
		id, size := le.Uint32(b), int(le.Uint16(b[4:]))
		if 6+size > len(b) {
			return h, false // an answer of another kind
		}
		if id == fnv32("limits") && size > 5 {
			copy(h.config[:], b[7:])
			h.known = true
		}
		b = b[6+size:]
	}
	return h, true
}

// loan is a packet of the limiter that lends what nobody has.
func loan(h heard, out uint64) []byte {
	b := append([]byte{1}, h.config[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.inc))
	b = binary.AppendUvarint(binary.AppendUvarint(b, 0), h.sent/1000)
	b = append(append(b, 1), 'k')
	b = append(b, 1) // a loan
	return binary.AppendUvarint(binary.AppendUvarint(b, 1), out)
}

// lend talks to one process as a member of a name, lends all the time, and counts the packets.
func (a *attacker) lend(ctx context.Context, at *Process, name string, packets *atomic.Int64) {
	seq := uint64(0)
	for inc := uint64(1); ctx.Err() == nil; inc++ {
		a.throw(a.packet(forged{name: name, inc: inc, toName: "", sent: uint64(time.Now().UnixNano())}), at)
		h, ok := a.listen()
		for range 200 {
			if !ok || ctx.Err() != nil {
				break
			}
			seq++
			f := forged{name: name, inc: inc, toInc: h.inc, toName: at.node.Self().Name, seq: seq, ack: h.seq, sent: uint64(time.Now().UnixNano()), echo: h.sent, echoed: 1}
			var blocks [][]byte
			if h.known {
				blocks = append(blocks, block("limits", loan(h, seq*1e12)))
				packets.Add(1)
			}
			config, known := h.config, h.known
			a.throw(a.packet(f, blocks...), at)
			if h, ok = a.listen(); !h.known {
				h.config, h.known = config, known
			}
		}
	}
}

// flood throws garbage, replays, forged names and absurd states at all.
func (a *attacker) flood(ctx context.Context, seed uint64, recorded [][]byte) {
	rng := rand.New(rand.NewPCG(seed, 1))
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		return b
	}
	firsts := []byte{0xC1, 0xD1, 0xD3, 0xE1, 0xA1, 0x00, 0xFF}
	sections := []string{"limits", "configuration", "breakers", "storms", "journal", "statuses"}
	for i := 0; ctx.Err() == nil; i++ {
		at := a.victims[i%len(a.victims)]
		var b []byte
		switch i % 8 {
		case 0:
			b = noise(1 + rng.IntN(1400))
			b[0] = firsts[rng.IntN(len(firsts))]
		case 1:
			b = recorded[rng.IntN(len(recorded))]
		case 2: // its own name, 40 bytes
			b = a.packet(forged{name: at.node.Self().Name, inc: math.MaxUint64 - uint64(i), sent: 1})
		case 3: // a new name, each time
			b = a.packet(forged{name: fmt.Sprint("x", i), inc: 1, sent: 1})
		case 4: // a new incarnation of one
			b = a.packet(forged{name: "lives", inc: uint64(i), sent: uint64(i)})
		case 5: // absurd states
			f := forged{name: "absurd", inc: 1, toInc: at.node.Self().Incarnation, toName: at.node.Self().Name, seq: uint64(i), sent: uint64(i)}
			b = a.packet(f, block(sections[rng.IntN(len(sections))], noise(rng.IntN(300))))
		case 6: // membership: indirect probes, compressed and nested packets, an announced gigabyte
			b = binary.LittleEndian.AppendUint32([]byte{0xD1}, fnv32(a.fleet))
			b = append(b, [][]byte{
				{1, 0x81, 0xA4, 'N', 'a', 'c', 'k', 0xC3}, append([]byte{9}, noise(200)...), {7, 1, 0, 4, 7, 1, 0, 1}, {4, 0x81, 0xA3, 'V', 's', 'n', 0xC6, 0x40, 0, 0, 0}, noise(30),
			}[rng.IntN(5)]...)
		case 7:
			b = a.packet(forged{flags: 2, name: "x", inc: 1, toInc: uint64(i), toName: at.node.Self().Name, seq: 1}, noise(8))
		}
		a.throw(b, at)
		if i%64 == 0 {
			time.Sleep(time.Millisecond) // what a test's own sockets can take: some 30,000 a second
		}
	}
}

// streams opens streams that say little and reserve much, slowly.
func (a *attacker) streams(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	inner := binary.LittleEndian.AppendUint32([]byte{0xD2}, fnv32(a.fleet))
	inner = append(inner, make([]byte, 13)...) // side, stream, number
	announced := append(inner, 6, 0x81, 0xA5, 'N', 'o', 'd', 'e', 's', 0xCE, 0, 0x10, 0, 0)
	some := append(inner, 6, 0x81, 0xA5, 'N', 'o', 'd', 'e', 's', 0xCD, 0x08, 0, 0x81)
	for i := range 300 {
		wg.Go(func() {
			for ctx.Err() == nil {
				c, err := new(net.Dialer).DialContext(ctx, "tcp", a.victims[i%len(a.victims)].Addr().String())
				if err != nil {
					return
				}
				frame := announced
				if i%2 == 0 {
					frame = some
				}
				b := append(binary.BigEndian.AppendUint16([]byte{0xA2}, uint16(len(frame))), frame...)
				if i%3 == 0 {
					b = []byte{0xA2, 0x3F, 0xFF, 0xD2}
				}
				_, _ = c.Write(b)
				a.sent.Add(1)
				_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
				_, _ = c.Read(make([]byte, 1))
				_ = c.Close()
			}
		})
	}
}

// posts has a page of another origin ask for a limit of a billion.
func (a *attacker) posts(ctx context.Context, url string) (taken int) {
	for i := 0; ctx.Err() == nil; i++ {
		body := `{"limit":{"rate":1e9,"burst":1000000}}`
		path := []string{"/fleet/change", "/fleet/evict?name=b"}[i%2]
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, strings.NewReader(body))
		if err != nil {
			return taken
		}
		r.Header.Set("Content-Type", []string{"text/plain", "application/json"}[i/2%2])
		r.Header.Set("Origin", "http://evil.example")
		if i%3 == 0 {
			r.Header.Set("Sec-Fetch-Site", "cross-site")
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			continue
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode < 400 {
			taken++
		}
	}
	return taken
}

// record is what a process sends to an address that it was given as a seed.
func (a *attacker) record(t *testing.T, members []string, opts ...Option) (recorded [][]byte) {
	t.Helper()
	c := configOf(members[0]+"-2", []string{a.conn.LocalAddr().String()}, members...)
	p, err := Start(c, opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var raw [2048]byte
	for range 3 {
		_ = a.conn.SetReadDeadline(time.Now().Add(time.Minute))
		n, _, err := a.conn.ReadFromUDPAddrPort(raw[:])
		if err != nil {
			t.Fatal(err)
		}
		recorded = append(recorded, append([]byte(nil), raw[:n]...))
	}
	return recorded
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Whoever reaches the ports, with a key or without: no limit is exceeded, memory stays
// within 64 MiB over idle, nothing panics, and nobody is put out. The one who floods
// lives in the same process, so the CPU time that is printed is that of both.
func TestAttacked(t *testing.T) {
	if testing.Short() {
		t.Skip("attacks a fleet for some seconds; run without -short")
	}
	const rate, burst = 1000, 100
	for _, keyed := range []bool{false, true} {
		t.Run(map[bool]string{false: "without a key", true: "with a key"}[keyed], func(t *testing.T) {
			var opts []Option
			if keyed {
				ring, err := gossip.NewKeyring(make([]byte, gossip.KeySize))
				if err != nil {
					t.Fatal(err)
				}
				opts = append(opts, WithKeyring((*Keyring)(ring)))
			}
			members := []string{"a", "b", "c"}
			a := &attacker{t: t, fleet: os.Getenv(fleetEnv)}
			var seeds []string
			for _, name := range members {
				c := configOf(name, seeds, members...)
				c.Limits.Limit = limiter.Limit{Rate: rate, Burst: burst}
				p, err := Start(c, opts...)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(p.Close)
				a.victims = append(a.victims, p)
				seeds = []string{p.Addr().String()}
				if !p.Addr().Addr().IsLoopback() {
					t.Fatalf("%s listens on %s", name, p.Addr())
				}
			}
			begun := time.Now()
			eventually(t, "they have met", func() bool {
				for _, p := range a.victims {
					if s := p.Status(); !s.Configuration.Settled || p.limits.Stats().Fenced {
						return false
					}
				}
				return true
			})
			socket := func() *net.UDPConn {
				conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = conn.Close() })
				return conn
			}
			a.conn = socket()
			server := httptest.NewServer(a.victims[0].Handler())
			defer server.Close()
			recorded := a.record(t, members, opts...)

			var idle, now runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&idle)
			cpu, from, peak := cpuTime(), time.Now(), uint64(0)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var wg sync.WaitGroup
			var admitted [3]atomic.Int64
			for i, p := range a.victims {
				wg.Go(func() {
					for k := p.Key("k"); ctx.Err() == nil; time.Sleep(time.Millisecond) {
						for k.Allow() {
							admitted[i].Add(1)
						}
					}
				})
			}
			for seed := range uint64(2) {
				wg.Go(func() { a.flood(ctx, seed, recorded) })
			}
			var taken, lent atomic.Int64
			for i, p := range a.victims {
				lender := &attacker{t: t, fleet: a.fleet, conn: socket(), victims: a.victims}
				wg.Go(func() { lender.lend(ctx, p, fmt.Sprint("lender", i), &lent) })
			}
			wg.Go(func() { a.streams(ctx) })
			wg.Go(func() { taken.Add(int64(a.posts(ctx, server.URL))) })
			named := func() (n int) {
				for _, p := range a.victims {
					n += len(p.limits.Stats().Broke)
				}
				return n
			}
			for ctx.Err() == nil {
				runtime.ReadMemStats(&now)
				peak = max(peak, now.HeapAlloc)
				time.Sleep(20 * time.Millisecond)
				// For five seconds, and on a busy machine until a loan has come through.
				if time.Since(from) > 5*time.Second && (keyed || lent.Load() > 0 && named() > 0) {
					cancel()
				}
			}
			wg.Wait()
			took := time.Since(from)
			total := int64(0)
			for i := range admitted {
				total += admitted[i].Load()
			}
			over := int64(peak) - int64(idle.HeapAlloc)
			t.Logf("%d packets and streams, %d forged loans in %.1f s; heap %.1f MiB over idle at most, %.2f processors; %d admitted",
				a.sent.Load(), lent.Load(), took.Seconds(), float64(over)/(1<<20), (cpuTime()-cpu).Seconds()/took.Seconds(), total)
			if most := burst + rate*time.Since(begun).Seconds(); float64(total) > most {
				t.Errorf("%d admitted, at most %.0f", total, most)
			}
			if over > 64<<20 {
				t.Errorf("the heap grew by %d bytes", over)
			}
			if taken.Load() != 0 || a.victims[0].Status().Configuration.Limit.Rate != rate {
				t.Errorf("%d posts of another origin were taken", taken.Load())
			}
			if (lent.Load() == 0) != keyed {
				t.Errorf("%d loans were forged", lent.Load())
			}
			for _, p := range a.victims {
				if err := p.Err(); err != nil {
					t.Errorf("%s is out: %v", p.node.Self().Name, err)
				}
			}
			if !keyed && named() == 0 {
				t.Error("nobody is named")
			}
			eventually(t, "they share the limit again", func() bool {
				for _, p := range a.victims {
					if !p.Key("k").Allow() {
						return false
					}
				}
				return true
			})
		})
	}
}
