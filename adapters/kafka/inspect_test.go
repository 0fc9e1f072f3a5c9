// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/stormguard-mq/stormguard/guard"
)

// refuseSettings has a cluster refuse the settings of the resources that which names.
func refuseSettings(fake *kfake.Cluster, which func(kmsg.ConfigResourceType, string) bool) {
	fake.ControlKey(int16(kmsg.DescribeConfigs), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		ask, ok := req.(*kmsg.DescribeConfigsRequest)
		if !ok || len(ask.Resources) != 1 || !which(ask.Resources[0].ResourceType, ask.Resources[0].ResourceName) {
			return nil, nil, false //nolint:nilnil // the cluster answers
		}
		resp, r := ask.ResponseKind().(*kmsg.DescribeConfigsResponse), kmsg.NewDescribeConfigsResponseResource()
		r.ResourceType, r.ResourceName, r.ErrorCode = ask.Resources[0].ResourceType, ask.Resources[0].ResourceName, kerr.TopicAuthorizationFailed.Code
		if r.ResourceType == kmsg.ConfigResourceTypeBroker {
			r.ErrorCode = kerr.ClusterAuthorizationFailed.Code
		}
		resp.Resources = append(resp.Resources, r)
		return resp, nil, true
	})
}

// A member that reads no longer than the slowest of its group may take fails in a rebalance, with
// sarama's defaults too.
func TestInspectReadTimeout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		read, rebalance time.Duration
		found           bool
	}{{30 * time.Second, time.Minute, true}, {time.Minute, time.Minute, false}, {5 * time.Second, 40 * time.Second, true}} {
		cfg := sarama.NewConfig()
		cfg.Net.ReadTimeout, cfg.Consumer.Group.Rebalance.Timeout = c.read, c.rebalance
		i := &inspection{client: configured{config: cfg}}
		i.settings()
		if found := slices.ContainsFunc(i.findings, func(f guard.Finding) bool {
			return f.Severity == guard.Notice && strings.Contains(f.What, "Net.ReadTimeout is "+c.read.String()) && strings.Contains(f.Fix, c.rebalance.String())
		}); found != c.found {
			t.Errorf("%s below %s: found %t, in %v", c.read, c.rebalance, found, i.findings)
		}
	}
}

// configured is a client as far as its settings go.
type configured struct {
	sarama.Client

	config *sarama.Config
}

func (c configured) Config() *sarama.Config { return c.config }

// Settings that may not be read are no settings without a fault: the error says so, and the
// findings have nothing that only they could tell. Who creates topics does without them.
func TestInspectWithoutTheRightToReadSettings(t *testing.T) {
	t.Parallel()
	r, fake := newFakeRig(t, kfake.NumBrokers(3))
	letters := DLQConfig{Sources: []string{r.topic}, Retention: time.Hour}
	parked := RetryConfig{Sources: letters.Sources, Group: r.group, Delays: []time.Duration{time.Minute}}
	client, err := sarama.NewClient(r.addrs, func() *sarama.Config {
		c := testConfig()
		c.Consumer.Return.Errors = true
		c.Net.ReadTimeout = c.Consumer.Group.Rebalance.Timeout
		return c
	}())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	inspect := func() ([]guard.Finding, string) {
		found, err := Inspect(client, Target{DLQ: letters, Retry: &parked})
		if err == nil {
			t.Fatal("nothing is said of what was refused")
		}
		return found, err.Error()
	}
	const topic, broker = "settings of topic %s: they may not be read: allow DescribeConfigs on the topic", "settings of broker %d: they may not be read: allow DescribeConfigs on the cluster"

	var all atomic.Bool
	all.Store(true)
	refuseSettings(fake, func(_ kmsg.ConfigResourceType, name string) bool { return all.Load() || name == r.topic })
	d, err := NewDLQ(r.addrs, testConfig(), letters)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	topics, err := NewRetryTopics(r.addrs, testConfig(), parked)
	if err != nil {
		t.Fatal(err)
	}
	defer topics.Close()
	register, err := NewRegister(r.addrs, testConfig(), RegisterConfig{Topic: "register"})
	if err != nil {
		t.Fatal(err)
	}
	defer register.Close()
	if _, _, err := register.Read(t.Context()); err != nil {
		t.Error(err)
	}
	found, said := inspect()
	controller, err := client.Controller()
	if err != nil {
		t.Fatal(err)
	}
	coordinator, err := client.Coordinator(r.group)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf(topic, r.topic), fmt.Sprintf(topic, "orders.dlq"), fmt.Sprintf(topic, "orders.billing.retry.1"),
		fmt.Sprintf(broker, controller.ID()), fmt.Sprintf(broker, coordinator.ID()),
	} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in: %s", want, said)
		}
	}
	for _, f := range found {
		t.Errorf("found, although no settings were read: %s", f)
	}

	all.Store(false)
	found, said = inspect()
	if strings.Count(said, "DescribeConfigs") != 1 || !strings.Contains(said, fmt.Sprintf(topic, r.topic)) {
		t.Errorf("the source alone is refused: %s", said)
	}
	for _, f := range found { // what is found at the others is of their own settings alone
		if f.Where == "topic "+r.topic || strings.Contains(f.What, r.topic+" keeps") || strings.Contains(f.What, "of "+r.topic+" 0") {
			t.Errorf("found, although the source's settings were not read: %s", f)
		}
	}
}

// Commands for a dead-letter topic that is too small serve the largest of its sources, too.
func TestInspectTellsTheSizeOfATopicThatIsTooSmall(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t, kfake.SeedTopics(2, "larger"), kfake.SeedTopics(4, "largest"), kfake.SeedTopics(1, "dead"))
	for limit, want := range map[int32][]string{0: {"4", "4"}, 2: {"2", "2"}, 1: nil} {
		found, err := Inspect(r.client, Target{DLQ: DLQConfig{Topic: "dead", Sources: []string{"largest", "orders", "larger"}, Partitions: limit}})
		if err != nil {
			t.Fatal(err)
		}
		var told []string
		for _, f := range found {
			if strings.Contains(f.What, "do not keep their partition") {
				told = append(told, f.Fix[strings.LastIndex(f.Fix, " ")+1:])
			}
		}
		if !slices.Equal(told, want) {
			t.Errorf("Partitions %d: %q, want %q", limit, told, want)
		}
	}
}

// The command that creates a missing dead-letter topic serves the largest of its sources, or has the
// partitions that the configuration names, as the topic that NewDLQ creates.
func TestInspectTellsTheSizeOfAMissingTopic(t *testing.T) {
	t.Parallel()
	r, _ := newFakeRig(t, kfake.SeedTopics(4, "large"))
	for want, letters := range map[string]DLQConfig{
		"--topic dead --partitions 4": {Topic: "dead", Sources: []string{"orders", "large"}},
		"--topic dead --partitions 7": {Topic: "dead", Sources: []string{"orders", "large"}, Partitions: 7},
	} {
		found, err := Inspect(r.client, Target{DLQ: letters})
		if err != nil {
			t.Fatal(err)
		}
		told := 0
		for _, f := range found {
			if f.Where == "topic dead" {
				told++
				if !strings.Contains(f.Fix+" ", want+" ") {
					t.Errorf("%q, want %q", f.Fix, want)
				}
			}
		}
		if told != 2 {
			t.Errorf("told of %d sources: %v", told, found)
		}
	}
}
