// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.uber.org/goleak"

	guardkafka "github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/limiter"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),     // one for all of sarama, for ever
		goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode")) // ends within 2 s
}

const patience = 2 * time.Minute

// A fleet of three consumes from a real Kafka, fails, and recovers, while a real Prometheus
// scrapes it. Each panel shows something while it is down or afterwards; while it is down
// the overview tells of the storm, and its alert fires.
func TestEachPanelShowsSomething(t *testing.T) {
	need(t, "prometheus", promtoolRemedy)
	sys := newSystem(t)
	p := startPrometheus(t, sys.targets)

	p.until(t, `count(count by (instance) (stormguard_window_used_ratio{messaging_destination_name=~"orders.*"})) == 3`) // one partition each
	sys.publish(t, 0, 400)
	p.until(t, `sum(stormguard_handled_total{messaging_destination_name=~"orders.*"}) > 300`)
	p.until(t, `min(count_over_time(stormguard_handled_total[15s])) > 3`) // rates are known
	missing := map[string]string{}                                        // queries that have shown nothing yet
	for _, d := range all() {
		maps.Copy(missing, d.expressions())
	}
	look := func() {
		maps.DeleteFunc(missing, func(_, expr string) bool { return len(p.query(t, expr)) > 0 })
	}
	look()

	sys.down.Store(true)
	sys.publish(t, 400, 600)
	p.until(t, `max(stormguard_hold_active{reason="storm"}) == 1`)
	p.until(t, `count(ALERTS{alertname="StormguardStorm", alertstate="firing"}) > 0`)
	look()
	for _, name := range []string{"Held", "In storm", "Breakers not closed"} {
		panel := stat1(t, overview, name)
		if v := p.query(t, panel); len(v) != 1 || v[0] < 1 {
			t.Errorf("%s is %v in a storm", name, v)
		}
	}

	sys.down.Store(false)
	for end := time.Now().Add(patience); len(missing) > 0; time.Sleep(200 * time.Millisecond) { // a recovery is soon over
		if look(); time.Now().After(end) {
			t.Fatalf("showed nothing: %q", slices.Sorted(maps.Keys(missing)))
		}
	}
	p.until(t, `sum(stormguard_messages{messaging_destination_name=~"orders.*"}) == 0`)
	p.until(t, `sum(stormguard_handled_total{messaging_destination_name=~"orders.*"}) > 590`)
	p.until(t, `max(stormguard_breaker_state{state!="closed"}) == 0 and max(stormguard_hold_active) == 0`)
	for _, name := range []string{"Held", "In storm", "Breakers not closed"} {
		if v := p.query(t, stat1(t, overview, name)); len(v) != 1 || v[0] != 0 {
			t.Errorf("%s is %v after the storm", name, v)
		}
	}

	// A name that nobody exports would be an alert that never fires.
	exported := p.names(t)
	for _, a := range alerts {
		for _, name := range regexp.MustCompile(`\b(stormguard|messaging)_\w+`).FindAllString(a.expr, -1) {
			if !exported[name] && !slices.Contains(labels, name) {
				t.Errorf("%s asks for %s, which nobody exports", a.name, name)
			}
		}
	}
}

// labels look like metrics.
var labels = []string{"messaging_consumer_group_name", "messaging_destination_name", "stormguard_source"}

// expressions are the queries of a dashboard by panel, with its variables filled in.
func (d dashboard) expressions() map[string]string {
	fill := strings.NewReplacer("$__rate_interval", "30s", "$__interval", "30s", "$group", ".*", "$topic", ".*", "$instance", ".*")
	found := map[string]string{}
	for _, r := range d.rows {
		for _, p := range r.panels {
			for i, q := range p.queries {
				found[fmt.Sprintf("%s: %s (%d)", d.title, p.title, i)] = fill.Replace(q.expr)
			}
		}
	}
	return found
}

func stat1(t *testing.T, d dashboard, title string) string {
	t.Helper()
	for name, expr := range d.expressions() {
		if strings.HasSuffix(name, ": "+title+" (0)") {
			return expr
		}
	}
	t.Fatalf("no panel %q", title)
	return ""
}

// system is a fleet of three that consumes orders, and a group with retry topics.
type system struct {
	down     atomic.Bool // the dependency
	once     sync.Map    // orders that have failed
	targets  []string    // to scrape
	producer sarama.SyncProducer
	orders   string
}

func newSystem(t *testing.T) *system {
	t.Helper()
	addrs := strings.Split(brokers.ForTest(t, brokers.Kafka), ",")
	id := strconv.FormatInt(time.Now().UnixNano(), 36)
	sys := &system{orders: "orders-" + id}
	parcels, shipping := "parcels-"+id, "shipping-"+id
	client, err := sarama.NewClient(addrs, kafkaConfig())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range []string{sys.orders, parcels} {
		if err := admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: -1}, false); err != nil {
			t.Fatal(err)
		}
	}
	if sys.producer, err = sarama.NewSyncProducerFromClient(client); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sys.producer.Close() })

	var store register.Memory
	var seeds []string
	members := []fleet.Share{{Name: "a"}, {Name: "b"}, {Name: "c"}}
	for _, m := range members {
		provider, target := meters(t)
		sys.targets = append(sys.targets, target)
		p, err := fleet.Start(fleet.Config{
			Fleet: sys.orders, Name: m.Name,
			Limits: fleet.Limits{
				Limit: limiter.Limit{Rate: 2000, Burst: 400}, Roster: fleet.Roster{Members: members},
			},
			Gossip: fleet.Gossip{Bind: "127.0.0.1:0", Seeds: seeds},
		}, fleet.WithRegister(&store), fleet.WithMeterProvider(provider), fleet.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		seeds = append(seeds, p.Addr().String())
		cfg := guard.Config{
			Group: "billing-" + id, SpillDir: t.TempDir(),
			Policy: guard.Policy{Spill: true, Storm: dlq.StormConfig{Age: 3 * time.Second, Window: 10 * time.Second}, Retry: guard.Retry{Base: 50 * time.Millisecond}},
		}
		g, err := guard.New(cfg, guard.WithFleet(p.Member()), guard.WithMeterProvider(provider), guard.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		sys.consume(t, g, addrs, cfg.Group, sys.orders, sys.charge, guardkafka.WithLimiter(p.Key("gateway")))
	}

	provider, target := meters(t)
	sys.targets = append(sys.targets, target)
	retries, err := guardkafka.NewRetryTopics(addrs, kafkaConfig(), guardkafka.RetryConfig{Sources: []string{parcels}, Group: shipping, Delays: []time.Duration{2 * time.Second}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = retries.Close() })
	g, err := guard.New(guard.Config{Group: shipping, Policy: guard.Policy{Order: guard.OrderKey, Retry: guard.Retry{Base: 10 * time.Millisecond}}},
		guard.WithMeterProvider(provider), guard.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	ship := func(_ context.Context, m *sarama.ConsumerMessage) error {
		if string(m.Value) == "13" {
			return errors.New("no such street")
		}
		return nil
	}
	sys.consume(t, g, addrs, shipping, parcels, ship, guardkafka.WithRetryTopics(retries))
	for i := range 40 {
		sys.send(t, parcels, "k"+strconv.Itoa(i%4), strconv.Itoa(i))
	}
	return sys
}

func kafkaConfig() *sarama.Config {
	c := sarama.NewConfig()
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Producer.Return.Successes = true
	c.Admin.Timeout = 30 * time.Second // of 3s a busy broker may need more
	c.Producer.Partitioner = sarama.NewHashPartitioner
	return c
}

// meters are those of one process, and the address of what it exports.
func meters(t *testing.T) (*sdkmetric.MeterProvider, string) {
	t.Helper()
	registry := prom.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	t.Cleanup(server.Close)
	return sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter)), strings.TrimPrefix(server.URL, "http://")
}

// charge is the handler of the orders.
func (sys *system) charge(ctx context.Context, m *sarama.ConsumerMessage) (err error) {
	done := guard.Calls(ctx, "gateway")
	defer func() { done(err) }()
	var n int
	if err := json.Unmarshal(m.Value, &n); err != nil {
		return err // it blames the message
	}
	_, again := sys.once.LoadOrStore(n, true)
	if sys.down.Load() || !again && n%100 == 20 {
		return guard.Unavailable(errors.New("the gateway is down"))
	}
	return nil
}

func (sys *system) consume(t *testing.T, g *guard.Guard, addrs []string, name, topic string, handle func(context.Context, *sarama.ConsumerMessage) error, o ...guardkafka.Option) {
	t.Helper()
	letters, err := guardkafka.NewDLQ(addrs, kafkaConfig(), guardkafka.DLQConfig{Sources: []string{topic}})
	if err != nil {
		t.Fatal(err)
	}
	group, err := sarama.NewConsumerGroup(addrs, name, kafkaConfig())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	h := guardkafka.Wrap(g, handle, append(o, guardkafka.WithDeadLetters(letters))...)
	go func() { ended <- guardkafka.Consume(ctx, group, []string{topic}, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		stop, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if _, err := g.Close(stop); err != nil {
			t.Error(err)
		}
		if err := letters.Close(); err != nil {
			t.Error(err)
		}
	})
}

// publish sends the orders from i to n. Each hundredth is no number, and another fails
// once.
func (sys *system) publish(t *testing.T, i, n int) {
	t.Helper()
	for ; i < n; i++ {
		body := strconv.Itoa(i)
		if i%100 == 50 {
			body = "{" + body
		}
		sys.send(t, sys.orders, body, body)
	}
}

func (sys *system) send(t *testing.T, topic, key, body string) {
	t.Helper()
	m := &sarama.ProducerMessage{Topic: topic, Key: sarama.StringEncoder(key), Value: sarama.StringEncoder(body)}
	if _, _, err := sys.producer.SendMessage(m); err != nil {
		t.Fatal(err)
	}
}

// prometheusServer is a Prometheus of the test's own.
type prometheusServer struct {
	url    string
	client http.Client
}

func startPrometheus(t *testing.T, targets []string) *prometheusServer {
	t.Helper()
	dir := t.TempDir()
	rules, err := filepath.Abs(filepath.Join("prometheus", "stormguard.rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "prometheus.yml"), fmt.Sprintf(`global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs: [{job_name: stormguard, static_configs: [{targets: ["%s"]}]}]
`, rules, strings.Join(targets, `", "`)))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(context.Background(), "prometheus", "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address, "--log.level=warn")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	p := &prometheusServer{url: "http://" + address}
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		if err := errors.Join(c.Process.Signal(os.Interrupt), c.Wait(), log.Close()); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("Prometheus said:\n%s", text)
		}
	})
	within(t, "Prometheus is ready", func() bool {
		resp, err := p.client.Get(p.url + "/-/ready")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return p
}

// within waits for what no event tells of.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in %s: %s", patience, what)
		}
	}
}

func (p *prometheusServer) until(t *testing.T, expr string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			metric := regexp.MustCompile(`stormguard_\w+`).FindString(expr)
			t.Logf("%s: %v", metric, p.query(t, metric))
		}
	}()
	within(t, expr, func() bool { return len(p.query(t, expr)) > 0 })
}

// query are the values of an expression now, but those that are not numbers.
func (p *prometheusServer) query(t *testing.T, expr string) (values []float64) {
	t.Helper()
	var got struct {
		Status, Error string
		Data          struct{ Result []struct{ Value [2]any } }
	}
	p.get(t, "/api/v1/query?query="+url.QueryEscape(expr), &got)
	if got.Status != "success" {
		t.Fatalf("%s: %s", expr, got.Error)
	}
	for _, r := range got.Data.Result {
		if text, _ := r.Value[1].(string); text != "NaN" {
			v, err := strconv.ParseFloat(text, 64)
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, v)
		}
	}
	return values
}

// names are all series' names.
func (p *prometheusServer) names(t *testing.T) map[string]bool {
	t.Helper()
	var got struct{ Data []string }
	p.get(t, "/api/v1/label/__name__/values", &got)
	found := map[string]bool{}
	for _, name := range got.Data {
		found[name] = true
	}
	if !found["stormguard_handled_total"] {
		t.Fatalf("only %v", slices.Sorted(maps.Keys(found)))
	}
	return found
}

func (p *prometheusServer) get(t *testing.T, path string, to any) {
	t.Helper()
	resp, err := p.client.Get(p.url + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(to); err != nil {
		t.Fatal(err)
	}
}
